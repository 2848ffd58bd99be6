"""Kernels compiled ahead of time for GPUs that are not here: they fit, and use the matrix units."""

from __future__ import annotations

import json
import sys

import pytest

from tests.kernels.ahead_of_time import compiled_by

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

SPILL_LIMIT_BYTES = 128
"""What a default may spill a thread: a few values outside of the loop."""

EVERY = ("fav2", "sage", "fav3_sage", "fav3_fp8")
WARP = {
    "fav2": ["mma bf16"],
    "sage": ["mma f16", "mma s8"],
    "fav3_sage": ["mma e4m3", "mma s8"],
    "fav3_fp8": ["mma e4m3"],
}
WARPGROUP = {kernel: [f"wg{name}" for name in names] for kernel, names in WARP.items()}
# Architecture -> the matrix instructions of each kernel that `dispatch` lets run there.
PRODUCTS = {
    "sm_80": {kernel: WARP[kernel] for kernel in ("fav2", "sage")},
    "sm_89": WARP,
    "sm_90": WARPGROUP,
    "sm_120": WARP,
}
OTHERS = {
    "sm_86": {kernel: WARP[kernel] for kernel in ("fav2", "sage")},
    "sm_100": {
        "fav2": ["tcgen05 f16"],
        "sage": ["mma s8", "tcgen05 f16"],
        "fav3_sage": ["mma s8", "tcgen05 f8f6f4"],
        "fav3_fp8": ["tcgen05 f8f6f4"],
    },
    "gfx942": {
        "fav2": ["mfma bf16"],
        "sage": ["mfma f16", "mfma i8"],
        "fav3_sage": ["mfma fp8", "mfma i8"],
        "fav3_fp8": ["mfma fp8"],
    },
    "gfx950": {
        "fav2": ["mfma bf16"],
        "sage": ["mfma f16", "mfma i8"],
        "fav3_sage": ["mfma f8f6f4", "mfma i8"],
        "fav3_fp8": ["mfma f8f6f4"],
    },
    "gfx1100": {"fav2": ["wmma bf16"], "sage": ["wmma f16", "wmma iu8"]},
    "gfx1201": {
        "fav2": ["wmma bf16"],
        "sage": ["wmma f16", "wmma iu8"],
        "fav3_sage": ["wmma fp8", "wmma iu8"],
        "fav3_fp8": ["wmma fp8"],
    },
    "gfx90a": {"fav2": ["mfma bf16"], "sage": ["mfma f16", "mfma i8"]},
}


sweep = pytest.mark.sweep
ALL = PRODUCTS | OTHERS
# One kernel of each architecture in every run, each kernel three times; a sweep has the rest.
SAMPLE = {arch: [*ALL[arch]][at % len(ALL[arch])] for at, arch in enumerate(ALL)}
DIMS = (64, 128)
QUANTIZERS = {"attention_only": False, "quantizers_only": True}


def compiled(*calls: dict[str, object]) -> list[dict[str, object]]:
    """What came out of each launch of some calls; a compiler that fails is this test's failure."""
    made = compiled_by("aot_builds", json.dumps(calls))
    assert made
    for one in made:
        assert one["smem_bytes"] <= one["limit_bytes"], one
        if one["name"].endswith(("attention_kernel", "product_kernel")):
            assert one["smem_bytes"] >= one["bound_bytes"], one
    return made


def of(kernel: str, arch: str, dim: int, **more: object) -> dict[str, object]:
    """A call of which the attention launch alone is compiled, unless told otherwise."""
    return {"kernel": kernel, "arch": arch, "dim": dim, "attention_only": True, **more}


def check_products(calls):
    """Each launch has the matrix instructions of its kernel, and on sm_90 few spills."""
    calls = [*calls]
    made = compiled(*calls)
    assert len(made) == len(calls)
    for one in made:
        arch, kernel = one["call"]["arch"], one["call"]["kernel"]
        assert one["products"] == ALL[arch][kernel], one
        if "registers" in one:
            assert one["spill_bytes"] <= SPILL_LIMIT_BYTES, one
            assert one["registers"] <= (one["config"]["maxnreg"] or 255), one


def test_a_default_of_every_architecture_compiles_fits_and_uses_the_matrix_units():
    """AMD's FP8 type is its own on gfx942 (report 111); fp32 precision names differ on it too."""
    assert {*SAMPLE.values()} == {*EVERY}
    check_products(
        of(kernel, arch, DIMS[at % 2], with_resources=arch == "sm_90")
        for at, (arch, kernel) in enumerate(SAMPLE.items())
    )


@sweep
@pytest.mark.parametrize("arch", ALL)
def test_all_defaults_compile_fit_and_use_the_matrix_units(arch):
    check_products(
        of(kernel, arch, dim, with_resources=arch == "sm_90")
        for kernel in ALL[arch]
        for dim in (DIMS if arch in PRODUCTS else (64,))
    )


def test_report_118_the_bound_is_below_what_deeper_pipelines_need():
    """The bound prunes candidates before they are compiled, so it may never be above the truth."""
    tiles = ({"num_stages": 1, "block_n": 256}, {"num_stages": 2}, {"num_stages": 4})
    wide, two, four = compiled(*(of("sage", "sm_80", 64, launch=tile) for tile in tiles))
    assert two["smem_bytes"] < four["smem_bytes"]
    assert 0 == wide["bound_bytes"] < two["bound_bytes"]
    assert four["bound_bytes"] == 3 * two["bound_bytes"]


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=sweep), "sm_90"])
def test_the_quantizers_compile_without_spills(arch):
    kernel = "sage" if arch == "sm_80" else "fav3_sage"
    [made] = compiled(of(kernel, arch, 128, **QUANTIZERS, with_resources=True))
    assert made["name"] == "prepass_kernel"
    assert made["spill_bytes"] == 0, made
    assert made["products"] == []


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=sweep), "sm_90"])
def test_they_compile_without_queries_whose_norm_is_to_come(arch):
    kernel = "sage" if arch == "sm_80" else "fav3_sage"
    made = compiled(of(kernel, arch, 128, **QUANTIZERS, with_resources=True, prologue=True))
    spills = {one["name"]: one["spill_bytes"] for one in made}
    assert spills == {"prologue_kernel": 0, "prepass_kernel": 0}
    assert len(made) == 3  # grouped heads: Q and K are launched apart


@pytest.mark.parametrize("arch", ["sm_89", pytest.param("sm_90", marks=sweep)])
def test_no_fp8_number_is_read_from_the_stack_pointer(arch):
    """Two ways to write the quantisers that ptxas builds wrong, without a word."""
    calls = [
        of(kernel, arch, dim, **QUANTIZERS, with_strays=True)
        for kernel, dim in (("fav3_sage", 256), ("fav3_fp8", 8))
    ]
    assert [one["strays"] for one in compiled(*calls)] == [[], []]


FORMS = (
    {"mask": "key_bias"},
    {"mask": "padding", "causal": True},
    {"mask": "dense", "return_lse": True},
    {"form": "packed", "causal": True, "return_lse": True},
    {"mask": "tiles", "form": "all", "causal": True, "return_lse": True},
)


MASKED = (("fav2", "sm_80", 128), ("fav3_sage", "sm_90", 64), ("sage", "gfx942", 128))


def check_masked(calls):
    """Each form has its kernel's products, and spills little."""
    for one in compiled(*calls):
        assert one["products"] == ALL[one["call"]["arch"]][one["call"]["kernel"]], one
        if not one["call"].get("form"):
            adds = one["call"]["mask"] == "dense"  # a third loop, with addresses of its own
            assert one["spill_bytes"] <= SPILL_LIMIT_BYTES * (2 if adds else 1), one


def test_each_kind_of_mask_compiles_fits_and_spills_little():
    check_masked(
        of(*MASKED[at % len(MASKED)], with_resources=True, **form) for at, form in enumerate(FORMS)
    )


@sweep
@pytest.mark.parametrize("built", MASKED, ids=str)
def test_every_kind_of_mask_compiles_fits_and_spills_little(built):
    check_masked(of(*built, with_resources=True, **form) for form in FORMS)


def check_rdna(calls):
    """The matrix units of RDNA, and no spills."""
    for one in compiled(*calls):
        assert one["products"] == OTHERS[one["call"]["arch"]][one["call"]["kernel"]], one
        assert one["spill_bytes"] == 0, one


def test_report_109_rdna_multiplies_on_its_matrix_units_and_spills_nothing():
    check_rdna(
        of(*call, with_resources=True)
        for call in (("fav3_sage", "gfx1201", 128), ("sage", "gfx1100", 64))
    )


@sweep
def test_report_109_every_kernel_of_rdna_does_so():
    dims = {"gfx1201": 128, "gfx1100": 64}
    check_rdna(
        of(kernel, arch, dim, with_resources=True)
        for arch, dim in dims.items()
        for kernel in OTHERS[arch]
    )


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=sweep)])
def test_every_form_of_a_call_compiles(arch):
    widest = "sage" if arch == "sm_80" else "fav3_sage"
    made = compiled(
        *(of(k, arch, 128, causal=True, return_lse=True) for k in PRODUCTS[arch]),
        of("fav2", arch, 256),
        of(widest, arch, 40),
        of("fav2", arch, 64, dtype="float16"),
        of(widest, arch, 64, launch={"loads": "pointer", "pv_flush": 0, "smooth_v": False}),
    )
    for one in made:
        kinds = PRODUCTS[arch][one["call"]["kernel"]]
        if one["call"].get("dtype") == "float16":
            kinds = [kind.replace("bf16", "f16") for kind in kinds]
        if one["call"]["dim"] <= 128 and one["call"]["dim"] % 64 == 0:
            assert one["products"] == kinds, one


def test_fp32_inputs_are_multiplied_without_tf32():
    [one] = compiled(of("fav2", "sm_80", 64, dtype="float32"))
    assert one["products"] == [], one


@sweep
def test_fp32_inputs_are_multiplied_without_tf32_on_hopper_too():
    [one] = compiled(of("fav2", "sm_90", 64, dtype="float32"))
    assert one["products"] == [], one
