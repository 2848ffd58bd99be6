"""The kernels of linears compiled ahead of time: they fit, and use the matrix units."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

from sage_plugin.kernels.support import ARCHITECTURES  # noqa: E402
from tests.kernels.test_aot import SPILL_LIMIT_BYTES, compiled, sweep  # noqa: E402

# Architecture -> the matrix instructions of FP8 and of INT8 products.
PRODUCTS = {
    "sm_80": {"int8_row": "mma s8"},
    "sm_86": {"int8_row": "mma s8"},
    "sm_89": {"fp8_row": "mma e4m3", "int8_row": "mma s8"},
    "sm_90": {"fp8_row": "wgmma e4m3", "int8_row": "wgmma s8"},
    "sm_100": {"fp8_row": "tcgen05 f8f6f4", "int8_row": "mma s8"},
    "sm_120": {"fp8_row": "mma e4m3", "int8_row": "mma s8"},
    "gfx90a": {"int8_row": "mfma i8"},
    "gfx942": {"fp8_row": "mfma fp8", "int8_row": "mfma i8"},
    "gfx950": {"fp8_row": "mfma f8f6f4", "int8_row": "mfma i8"},
    "gfx1100": {"int8_row": "wmma iu8"},
    "gfx1201": {"fp8_row": "wmma fp8", "int8_row": "wmma iu8"},
}
EVERY = [(arch, kernel) for arch, kernels in PRODUCTS.items() for kernel in kernels]
FEW = [("sm_80", "int8_row"), ("sm_89", "fp8_row"), ("sm_90", "fp8_row"), ("sm_90", "int8_row"),
       ("gfx942", "fp8_row"), ("gfx1100", "int8_row")]  # fmt: skip


def check_products(builds) -> None:
    """Many rows, and few."""
    made = compiled(
        *(
            {"linear": kernel, "arch": arch, "rows": rows, "attention_only": True,
             "with_resources": True}
            for arch, kernel in builds
            for rows in (4096, 16)
        )
    )  # fmt: skip
    assert len(made) == 2 * len(builds)
    for one in made:
        arch, kernel = one["call"]["arch"], one["call"]["linear"]
        assert one["products"] == [PRODUCTS[arch][kernel]], one
        assert one["spill_bytes"] <= SPILL_LIMIT_BYTES, one


def test_products_compile_fit_and_use_the_matrix_units() -> None:
    check_products(FEW)


@sweep
def test_all_of_them_do() -> None:
    runs = {row.names[0]: {k for k in ("fp8_row", "int8_row") if row.runs(k)}
            for row in ARCHITECTURES}  # fmt: skip
    assert all(runs[arch] == {*kernels} for arch, kernels in PRODUCTS.items())
    check_products([one for one in EVERY if one not in FEW])


ROWS = (
    {"linear": "fp8_row", "arch": "sm_90", "prologue": "layer_norm"},
    {"linear": "int8_row", "arch": "sm_80", "prologue": "gelu", "asymmetric": True},
    {"linear": "fp8_row", "arch": "sm_90", "prologue": "swiglu", "in_features": 40_000},
    {"linear": "fp8_tensor", "arch": "sm_89", "rotation": 128, "dtype": "float32"},
)


def test_the_quantizer_of_rows_compiles_without_spills() -> None:
    made = compiled(
        *({"rows": 64, "quantizers_only": True, "with_resources": True, **one} for one in ROWS)
    )
    assert len(made) == len(ROWS) + 1  # one scale for all rows takes two launches
    for one in made:
        assert one["name"] == "quantize_rows_kernel"
        assert one["products"] == []
        assert one["spill_bytes"] <= 16, one


def test_no_fp8_number_of_a_row_is_read_from_the_stack_pointer() -> None:
    """What ptxas builds wrong without a word; see `block_kernels`."""
    made = compiled(
        *(
            {"linear": "fp8_row", "arch": arch, "rows": 64, "in_features": channels,
             "quantizers_only": True, "with_strays": True}
            for arch, channels in (("sm_89", 40), ("sm_90", 1920))
        )
    )  # fmt: skip
    assert [one["strays"] for one in made] == [[], []]
