"""The grouped product compiled ahead of time: it fits and uses the matrix units."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

from tests.kernels.linear.test_aot import PRODUCTS  # noqa: E402
from tests.kernels.test_aot import SPILL_LIMIT_BYTES, compiled, sweep  # noqa: E402

SIXTEEN_BITS = {
    "sm_80": "mma bf16", "sm_86": "mma bf16", "sm_89": "mma bf16", "sm_90": "wgmma bf16",
    "sm_100": "tcgen05 f16", "sm_120": "mma bf16", "gfx90a": "mfma bf16", "gfx942": "mfma bf16",
    "gfx950": "mfma bf16", "gfx1100": "wmma bf16", "gfx1201": "wmma bf16",
}  # fmt: skip
OF_FEW_ROWS = {"bf16": "mma bf16", "fp8_row": "mma f16", "int8_row": "mma s8"}
"""Those of sm_90 for groups of few rows, whose weights decide: `wgmma` takes 64 rows at least."""
EVERY = [
    (arch, kernel, rows)
    for arch in PRODUCTS
    for kernel in ("bf16", *PRODUCTS[arch])
    for rows in (4096, 16)
]
FEW = [("sm_90", "fp8_row", 4096)]


def check_products(builds) -> None:
    """Groups of many rows, and of few."""
    made = compiled(
        *(
            {"linear": kernel, "arch": arch, "rows": rows, "groups": 8, "with_resources": True}
            for arch, kernel, rows in builds
        )
    )
    products = [one for one in made if one["name"] == "grouped_product_kernel"]
    assert len(products) == len(builds)
    for one in products:
        arch, kernel = one["call"]["arch"], one["call"]["linear"]
        instruction = SIXTEEN_BITS[arch] if kernel == "bf16" else PRODUCTS[arch][kernel]
        if arch == "sm_90" and one["call"]["rows"] == 16:
            instruction = OF_FEW_ROWS[kernel]
        assert one["products"] == [instruction], one
        assert one["spill_bytes"] <= SPILL_LIMIT_BYTES, one
    others = [one for one in made if one not in products]
    assert {one["name"] for one in others} == {
        "count_choices_kernel", "place_choices_kernel", "quantize_rows_kernel",
        "schedule_groups_kernel", "combine_rows_kernel",
    }  # fmt: skip
    assert all(one["spill_bytes"] == 0 and one["products"] == [] for one in others), others


def test_products_compile_fit_and_use_the_matrix_units() -> None:
    check_products(FEW)


@sweep
def test_all_of_them_do() -> None:
    check_products([one for one in EVERY if one not in FEW])
