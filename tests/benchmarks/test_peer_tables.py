"""The README's table of peers is what its result file says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tables():
    return importlib.import_module("peer_tables")


def report():
    def row(variant, tflops, error):
        return {"preset": "p", "variant": variant, "tflops": tflops, "centred_rel_l1": error}

    return {
        "tables": [
            {
                "preset": "p",
                "stamp": "noisy",
                "shape": {"batch": 2, "heads_q": 3, "seq_q": 5, "head_dim": 64},
            }
        ],
        "rows": [
            *(row(f"{k}{part}", n, 0.0456) for n, k in enumerate(("fav3_sage", "fav3_fp8", "sage"))
              for part in ("", " kernel alone")),
            row("fa3 fp8 kernel alone", 100.4, 19.7),
            row("sageattention 1.0.6", 7.0, 0.148),
            row("sageattention 1.0.6 kernel alone", 8.0, 0.148),
        ],
    }  # fmt: skip


def test_a_line_has_speed_alone_with_quantization_and_error(tables):
    assert tables.table(report()).splitlines() == [
        "| shape | `fav3_sage` | `fav3_fp8` | `sage` | FA3 FP8, alone | SageAttention 1.0.6 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| p: 2x3x5x64, noisy | 0 / 0 (0.046) | 1 / 1 (0.046) | 2 / 2 (0.046) | 100 (20) "
        "| 8 / 7 (0.15) |",
    ]


def test_the_readme_has_the_table_of_its_file(tables):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page == tables.rendered(page), "run benchmarks/peer_tables.py --write"
    assert page != page.replace("fav3_sage", "")


def test_a_changed_figure_is_seen(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "peers_a.json").write_text(json.dumps(report()))
    page = tables.rendered("<!-- table: peers_a.json -->\n<!-- end -->\n")
    assert tables.rendered(page) == page
    monkeypatch.setattr(tables, "README", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(page.replace("100 (20)", "101 (20)"))
    monkeypatch.setattr(tables.sys, "argv", ["peer_tables.py"])
    assert tables.main() == 1
    monkeypatch.setattr(tables.sys, "argv", ["peer_tables.py", "--write"])
    assert tables.main() == 0
    assert (tmp_path / "page.md").read_text() == page


def test_a_page_without_a_mark_is_refused(tables):
    with pytest.raises(ValueError, match="no mark"):
        tables.rendered("nothing")
