"""The Gluon kernel compiled ahead of time for sm_90: it fits, and its main loop spills nothing."""

from __future__ import annotations

import itertools
import sys

import pytest

from tests.kernels.calls import FP8_WEIGHTS, HOPPER

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

from tests.kernels.test_aot import WARPGROUP, compiled, of, sweep  # noqa: E402

SMEM_OF_A_PROGRAM = 232_448
SMALL_PARTS_BYTES = 2048
"""Barriers, and the ones that row sums are products with: all that the bound leaves out."""
SPILL_LIMIT_BYTES = {"plain": 512, "causal": 640, "terms": 896}
"""What a thread may spill outside of the main loop, such as what all tiles of a program need; terms
of keys take registers."""
HALF_SPILL_LIMIT_BYTES = {"plain": 704, "causal": 768, "terms": 960}
"""The same with fp16 weights and 128 channels."""
SHARED_SPILL_LIMIT_BYTES = 768
"""The same where programs share their last tiles, which has them store pieces too."""
LOCAL_LIMIT = {"plain": 0, "causal": 1, "terms": 18}
"""Accesses to spilt values in the main loop."""
HALF_LOCAL_LIMIT = {"plain": 8, "causal": 8, "terms": 30}
"""The same with fp16 weights and 128 channels: a program that spills this little is faster than one
that asks the other lanes for maxima at every block."""
FORMS = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True},
    "terms": {"mask": "key_bias"},
}
CASES = [(form, dim, kernel) for form in FORMS for dim in (64, 128) for kernel in HOPPER]
# Each form, kernel and head dim in every run; a sweep has the rest.
FEW = [(form, dim, kernel) for form, dim, kernel in zip(FORMS, (64, 128, 128), HOPPER, strict=True)]


def built(*cases, **fields):
    """What came out of cases, each with its form."""
    calls = [
        of(kernel, "sm_90", dim, variant="hopper", with_resources=True, with_loops=True)
        | FORMS[form]
        | fields
        for form, dim, kernel in cases
    ]
    made = compiled(*calls)
    assert len(made) == len(cases)
    return zip(cases, made, strict=True)


def main_loops(made):
    """The loops over blocks that all rows see whole: they compare no key with a position."""
    return [loop for loop in made["loops"] if loop["selected"] < 16]


def check(case, made):
    form, _, kernel = case
    groups = made["config"]["block_m"] // 64
    assert made["name"] == "hopper_attention_kernel"
    assert made["products"] == WARPGROUP[kernel], made
    assert made["serialised"] == [], made
    assert made["limit_bytes"] == SMEM_OF_A_PROGRAM
    assert made["bound_bytes"] <= made["smem_bytes"] <= SMEM_OF_A_PROGRAM, made
    assert made["smem_bytes"] <= made["bound_bytes"] + SMALL_PARTS_BYTES, made
    half = kernel == "sage" and made["call"]["dim"] == 128
    spilt = (HALF_SPILL_LIMIT_BYTES if half else SPILL_LIMIT_BYTES)[form]
    if "seq" in made["call"]:
        spilt = SHARED_SPILL_LIMIT_BYTES
    assert made["spill_bytes"] <= spilt, made
    assert len(made["loops"]) == 2 * groups, made
    loops = main_loops(made)
    assert len(loops) == groups, made
    for loop in loops:
        # Totals that are flushed at every block are in the loop with their registers.
        flushed = made["config"]["pv_flush"] == 1
        limits = HALF_LOCAL_LIMIT if half else LOCAL_LIMIT
        assert loop["local"] <= limits["terms" if flushed else form], made
        # A thread has half of the block's weights, two decays; a linear weight needs no exp2.
        exact = made["config"]["block_n"] // 2
        if form != "terms":
            exact = exact * (8 - made["config"]["exp_linear"]) // 8
        assert loop["special"] == exact + 2, made


def test_a_default_builds_fits_and_spills_nothing_in_its_main_loop():
    for case, made in built(*FEW):
        check(case, made)


@sweep
@pytest.mark.parametrize("dim", [64, 128])
def test_the_other_defaults_do_so_too(dim):
    for case, made in built(*(case for case in CASES if case[1] == dim and case not in FEW)):
        check(case, made)


FIELDS = (
    {"block_m": 128, "num_warps": 8},
    {"exp_linear": 0},
    {"exp_linear": 6},
    {"pv_flush": 0},
    {"pv_flush": 1},
    {"block_n": 64, "num_stages": 4, "exp_linear": 4},
    {"smooth_k": False},
    {"persistent": False},
)


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [
        pytest.param(kernel, fields, id=f"{kernel}-{fields}", marks=[] if at == 4 else sweep)
        for at, (fields, kernel) in enumerate(itertools.product(FIELDS, FP8_WEIGHTS))
    ],
)
def test_every_field_of_a_config_builds(kernel, fields):
    [(case, made)] = built(("plain", 128, kernel), launch=fields)
    assert {name: made["config"][name] for name in fields} == fields
    check(case, made)


def check_overlap(dim, kernels, overlap):
    fields = {"overlap": overlap, "block_n": 128 if dim == 64 else 64}
    for case, made in built(*(("plain", dim, kernel) for kernel in kernels), launch=fields):
        assert {name: made["config"][name] for name in fields} == fields
        check(case, made)


def test_a_block_that_overlaps_the_next_builds():
    check_overlap(128, HOPPER[:1], True)


@sweep
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_block_that_may_overlap_the_next_builds(overlap, dim):
    check_overlap(dim, HOPPER, overlap)


@pytest.mark.parametrize("dim", [pytest.param(64, marks=sweep), 128])
@pytest.mark.parametrize(
    "kernel", [HOPPER[-1], *(pytest.param(kernel, marks=sweep) for kernel in HOPPER[:-1])]
)
def test_programs_that_share_their_last_tiles_build(kernel, dim):
    """2,048 keys are enough for shares; the launch that joins them is the call's last."""
    call = of(kernel, "sm_90", dim, variant="hopper", with_resources=True, with_loops=True)
    *_, made, merge = compiled(call | {"seq": 2048, "attention_only": False})
    check(("plain", dim, kernel), made)
    assert merge["name"] == "combine_kernel"
    assert merge["spill_bytes"] == 0, merge


SHAPES = (
    {"dim": 40, "dtype": "float16"},
    {"dim": 80, "causal": True, "return_lse": True, "mask": "padding"},
    {"dim": 96, "dtype": "float32"},
    {"dim": 128, "mask": "padding", "return_lse": True},
    {"dim": 33},
)


def check_forms(*calls):
    for one in compiled(*(of(kernel, "sm_90", **form, variant="hopper") for kernel, form in calls)):
        assert one["name"] == "hopper_attention_kernel"
        assert one["products"] == WARPGROUP[one["call"]["kernel"]], one
        assert one["smem_bytes"] <= one["bound_bytes"] + SMALL_PARTS_BYTES, one


def test_a_form_of_a_call_of_each_kernel_builds():
    check_forms(*zip(HOPPER, SHAPES, strict=False))


@sweep
@pytest.mark.parametrize("kernel", HOPPER)
def test_every_form_of_a_call_builds(kernel):
    check_forms(*((kernel, form) for form in SHAPES))


def test_the_spills_of_a_loop_and_its_comparisons_are_told_apart():
    """Of what `check` looks at: a loop over the last blocks compares, and the others do not."""
    loops = [{"selected": 80, "local": 9}, {"selected": 0, "local": 0}]
    assert main_loops({"loops": loops}) == loops[1:]
