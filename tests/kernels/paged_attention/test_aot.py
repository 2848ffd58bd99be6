"""Paged attention compiled ahead of time: it fits, does not spill, and uses the matrix units."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

from sage_plugin.kernels.paged_attention.search_space import REGIONS  # noqa: E402
from sage_plugin.kernels.support import ARCHITECTURES  # noqa: E402
from scripts.aot_builds import OPTIONS  # noqa: E402
from scripts.aot_paged import PagedBuild  # noqa: E402
from tests.kernels.test_aot import compiled, sweep  # noqa: E402
from tests.script import loaded  # noqa: E402

DECODE = {
    "sm_80": "mma bf16", "sm_90": "mma bf16", "sm_100": "mma bf16", "sm_120": "mma bf16",
    "gfx942": "mfma bf16", "gfx1201": "wmma bf16",
}  # fmt: skip
"""The matrix instructions of both products where 16 rows are a tile."""


def test_every_default_is_in_the_matrix_of_compiled_calls() -> None:
    program = loaded("compile_matrix")
    found = set()
    for row in (row for row in ARCHITECTURES if row.kernels):
        for name in row.names:
            wanted = [one for one in program.calls(row, name) if "paged" in one]
            own = [{n: x for n, x in one.items() if n not in OPTIONS} for one in wanted]
            configs = [PagedBuild(**one).config() for one in own]
            assert configs, f"nothing is compiled for {name}"
            found |= {
                i
                for i, r in enumerate(REGIONS)
                if fnmatchcase(name, r.arch) and r.default in configs
            }
    assert [r.arch for i, r in enumerate(REGIONS) if i not in found] == ["emulation"]


@sweep
def test_decoding_compiles_for_every_kind_of_chip() -> None:
    calls = [{"paged": "fav2", "arch": arch, "dim": 128} for arch in DECODE]
    made = compiled(*(one | {"with_resources": True, "attention_only": True} for one in calls))
    for one in made:
        if one["name"] == "paged_attention_kernel":
            assert one["products"] == [DECODE[one["call"]["arch"]]], one
            assert one["spill_bytes"] == 0, one
    assert sum(one["name"] == "paged_attention_kernel" for one in made) == len(DECODE)
