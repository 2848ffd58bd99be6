"""docs/hardware.md is what the code says, and the compile matrix is of the configs of today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sage_plugin.kernels.attention.launch_space import default_config
from sage_plugin.kernels.support import (
    ARCHITECTURES,
    LOWEST_TRITON,
    NEWEST_TRITON,
    Architecture,
    release,
)
from tests.kernels.calls import HOPPER
from tests.script import loaded

ROOT = Path(__file__).resolve().parents[2]
CLAIMED = [row for row in ARCHITECTURES if row.kernels]
DIMS = (64, 128, 256)


tables = loaded("hardware_tables")


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    """The committed compile matrix."""
    return dict(json.loads(tables.MATRIX.read_text()))


@pytest.fixture(scope="module")
def launched(matrix: dict[str, Any]) -> list[dict[str, Any]]:
    """Its launches of attention kernels."""
    rows = [dict(zip(matrix["columns"], row, strict=True)) for row in matrix["rows"]]
    return [row for row in rows if row["name"].endswith("attention_kernel")]


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert page == tables.rendered(page), "run scripts/hardware_tables.py --write"


def test_a_changed_table_is_noticed() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert "e4m3fnuz" in page
    assert tables.rendered(page.replace("e4m3fnuz", "e5m2")) == tables.rendered(page)
    # Support, four kernels, their Hopper variants, matrix.
    assert tables.rendered(page).count("| sm_90 |") == 6 + len(HOPPER)


def test_the_matrix_names_what_it_was_made_with(matrix: dict[str, Any]) -> None:
    assert {release(version) for version in matrix["identity"]["assemblers"]} == {
        release(LOWEST_TRITON),
        release(NEWEST_TRITON),
    }
    assert set(matrix["identity"]) >= {"sage_plugin", "date", "torch", "python", "kernels_sha256"}


def test_everything_in_the_matrix_compiled_and_fits(
    matrix: dict[str, Any], launched: list[dict[str, Any]]
) -> None:
    assert matrix["failures"] == []
    limits = {name: row.smem_kib * 2**10 for row in ARCHITECTURES for name in row.names}
    for row in launched:
        assert row["smem_bytes"] <= limits[row["arch"]], row
        assert row["products"] or row["dtype"] == "float32", row


@pytest.mark.parametrize("row", CLAIMED, ids=lambda row: row.names[0])
def test_every_claimed_default_is_in_the_matrix_as_it_is_today(
    row: Architecture, launched: list[dict[str, Any]]
) -> None:
    lowest = max((LOWEST_TRITON, row.triton), key=release)
    for name in row.names:
        dims = DIMS if name == row.names[0] else DIMS[:2]
        for kernel in row.kernels:
            for dim in dims:
                config = default_config(kernel, name, dim)
                assert config is not None
                found = [
                    {field: one[field] for field in ("block_m", "block_n", "num_warps", "maxnreg")}
                    for one in launched
                    if (one["arch"], one["kernel"], one["dim"]) == (name, kernel, dim)
                    and one.get("variant", "portable") == "portable"
                    and (one["dtype"], one["mask"], one["causal"]) == ("bfloat16", "", False)
                ]
                own = config.to_json()
                versions = 2 if release(lowest) == release(LOWEST_TRITON) else 1
                assert found == [{field: own[field] for field in found[0]}] * versions


@pytest.mark.parametrize("kernel", HOPPER)
def test_every_hopper_default_is_in_the_matrix_as_it_is_today(
    kernel: str, launched: list[dict[str, Any]]
) -> None:
    for dim in DIMS[:2]:
        config = default_config(kernel, "sm_90", dim, variant="hopper")
        assert config is not None
        own = config.to_json()
        found = [
            {field: one[field] for field in ("block_m", "block_n", "num_warps", "num_stages")}
            for one in launched
            if (one.get("variant"), one["kernel"], one["dim"]) == ("hopper", kernel, dim)
            and (one["dtype"], one["mask"], one["causal"]) == ("bfloat16", "", False)
        ]
        assert found, "run make compile-matrix"
        assert found == [{field: own[field] for field in found[0]}] * 2


def test_a_part_of_the_matrix_is_made_anew_and_the_rest_kept(tmp_path):
    script = loaded("compile_matrix")
    path = tmp_path / "matrix.json"
    rows = []
    for about in (
        ("3.6.0", "sm_80", "portable"),
        ("3.6.0", "sm_90", "portable"),
        ("3.6.0", "sm_90", "hopper"),
        ("3.9.0", "sm_90", "hopper"),
    ):
        named = dict(zip(("triton", "arch", "variant"), about, strict=True))
        rows.append([named.get(column, "") for column in script.COLUMNS])
    path.write_text(json.dumps({"identity": {}, "failures": [], "rows": rows}))
    both = ["3.6.0", "3.9.0"]
    assert script.kept(path, both, ["sm_90"], "hopper")["rows"] == rows[:2]
    assert script.kept(path, ["3.6.0"], ["sm_90"], "hopper")["rows"] == rows[:2] + rows[3:]
    assert script.kept(path, both, ["sm_90"], None)["rows"] == rows[:1]
    assert script.kept(path, both, ["sm_80", "sm_90"], "portable")["rows"] == rows[2:]
