"""Files far beyond any of ours are refused by their size or their first lines, not read through."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from sage_plugin.capture.store import checks, manifest
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.errors import CaptureError, ConfigError
from sage_plugin.plugin.policy import rules
from tests.capture.toys import line, tensors


def never(*_, **__):
    raise AssertionError("was read all the same")


@pytest.fixture
def folder(tmp_path):
    writer = CaptureWriter(tmp_path / "captures")
    writer.open()
    writer.save(tensors(), line())
    writer.close(manifest.CallCounts())
    return writer.folder


def test_a_policy_of_many_rules_is_refused_by_their_number(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    many = [{"kernel": "sage", "layers": [f"*{n}*"]} for n in range(rules.MOST_RULES + 1)]
    path.write_text(json.dumps({"schema_version": 1, "rules": many}))
    monkeypatch.setattr(rules.Policy, "from_json", never)
    with pytest.raises(ConfigError, match="more than 1000 rules"):
        rules.read(path)


def test_the_reader_stops_at_so_many_damaged_lines(folder, monkeypatch):
    with open(folder / manifest.MANIFEST, "a") as stream:
        stream.write("x\n" * 100_000)
    parsed = []
    stock = manifest._parse_line
    monkeypatch.setattr(manifest, "_parse_line", lambda *a: parsed.append(a) or stock(*a))
    captures = open_captures(folder)
    assert len(captures.records) == 1
    assert len(captures.problems) == manifest.MOST_PROBLEMS + 1
    assert captures.problems[-1].startswith("manifest.jsonl has further damaged lines")
    assert len(parsed) == manifest.MOST_PROBLEMS + 2


def test_a_capture_with_a_long_head_is_not_opened(folder, monkeypatch):
    save_file({f"t{n}": torch.empty(0) for n in range(2000)}, folder / "000000.safetensors")
    monkeypatch.setattr(checks, "safe_open", never)
    with pytest.raises(CaptureError, match="its head is larger than that of any capture"):
        open_captures(folder)
