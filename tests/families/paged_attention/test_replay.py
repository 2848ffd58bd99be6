"""Paged attention as tools replay it: drawn, judged, beside torch's own, and found by its key."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.accuracy.gate import failures
from sage_plugin.errors import DeviceError, UnknownKernelError, UsageError
from sage_plugin.families import describe, describe_key, family
from sage_plugin.families.paged_attention.entry import PAGED_FAMILY
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.support import architecture
from sage_plugin.paged_records import PAGED_KINDS, PagedShape
from tests.kernels.devices import CPU, facts

DECODE = PagedShape((1, 1, 1), (40, 40, 40), 4, 2, 32, "bfloat16", "bfloat16", 16, 48)
PREFILL = dataclasses.replace(DECODE, q_lens=(33,), kv_lens=(33,))
MIXED = dataclasses.replace(DECODE, q_lens=(1, 1, 9))
SHAPES = {shape.kind: shape for shape in (DECODE, PREFILL, MIXED)}


@pytest.mark.parametrize("kind", PAGED_KINDS)
@pytest.mark.parametrize("cache", ["bfloat16", "int8", "float8_e4m3fn"])
def test_kernels_pass_their_gates_on_drawn_calls(kind: str, cache: str) -> None:
    shape = dataclasses.replace(SHAPES[kind], cache_dtype=cache)
    call = PAGED_FAMILY.drawn(shape, "cpu", 1, "biased")
    kernels = {"int8": ["qk_int8"], "float8_e4m3fn": ["qk_fp8"]}.get(cache, [])
    errors = {}
    for kernel in ("sdpa", "fav2", *kernels):
        decision = PAGED_FAMILY.decide(shape, CPU, kernel=kernel)
        key = PAGED_FAMILY.call_key(shape, decision)
        config = None if decision.variant == HOST else PAGED_FAMILY.default_launch(key, CPU)
        errors[kernel] = call.errors(decision, config)
        assert failures(PAGED_FAMILY.gate_for(kernel), errors[kernel]) == [], kernel
    # the same numbers are judged whatever the cache: what it lost before is no kernel's
    assert errors["fav2"].rel_l1 < 0.004
    for kernel in kernels:
        assert errors[kernel].rel_l1 > 1.5 * errors["fav2"].rel_l1


@pytest.mark.parametrize("kind", PAGED_KINDS)
def test_a_key_has_a_shape_that_has_it(kind: str) -> None:
    decision = Decision("fav2", "triton")
    key = PAGED_FAMILY.call_key(SHAPES[kind], decision)
    assert key.kind == kind
    assert PAGED_FAMILY.call_key(PAGED_FAMILY.shape_of(key), decision) == key
    assert kind in describe_key(key)
    assert describe(SHAPES[kind]).startswith(kind)


def test_what_is_asked_of_the_entry() -> None:
    assert family("paged_attention") is PAGED_FAMILY
    with pytest.raises(UnknownKernelError, match="sdpa to compare with"):
        PAGED_FAMILY.parse_kernel("sage")
    with pytest.raises(DeviceError, match="tuned on a GPU only"):
        PAGED_FAMILY.refuse_untuned("fav2", Decision("fav2", "emulation"), CPU)
    with pytest.raises(UsageError, match="no launch config"):
        PAGED_FAMILY.refuse_untuned("sdpa", Decision("sdpa", HOST), facts("sm_90"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1201"])
@pytest.mark.parametrize("kind", PAGED_KINDS)
def test_every_default_is_legal_and_first_of_its_space(arch: str, kind: str) -> None:
    assert architecture(arch) is not None
    where, decision = facts(arch), Decision("fav2", "triton")
    for head_dim in (64, 128, 256):
        for dtype in ("bfloat16", "float32"):
            shape = dataclasses.replace(
                SHAPES[kind], head_dim=head_dim, dtype=dtype, cache_dtype=dtype, heads_q=80
            )
            key = PAGED_FAMILY.call_key(shape, decision)
            default = PAGED_FAMILY.default_launch(key, where)
            space = PAGED_FAMILY.search_space(key, where)
            assert PAGED_FAMILY.illegal_reason(default, key, where) is None
            assert space[0] == default
            assert sum(PAGED_FAMILY.illegal_reason(c, key, where) is None for c in space) > 3


def test_illegal_configs_are_told_why() -> None:
    where, decision = facts("sm_80"), Decision("fav2", "triton")
    key = PAGED_FAMILY.call_key(DECODE, decision)
    default = PAGED_FAMILY.default_launch(key, where)
    for changes, says in (
        ({"block_n": 48}, "block_n 48 is not one of"),
        ({"splits": 999}, "splits 999"),
        ({"loads": "descriptor"}, "needs TMA"),
        ({"num_stages": 8, "block_n": 256}, "bytes of shared memory"),
        ({"waves_per_eu": 2}, "on AMD"),
    ):
        wide = dataclasses.replace(key, head_dim=256)
        assert says in PAGED_FAMILY.illegal_reason(default.replaced(**changes), wide, where)
    long = dataclasses.replace(key, page_size=48)
    hopper = default.replaced(loads="descriptor", block_n=32)
    assert "steps inside of a page" in PAGED_FAMILY.illegal_reason(hopper, long, facts("sm_90"))


def test_bytes_of_a_recorded_call_are_those_that_move() -> None:
    call = PAGED_FAMILY.drawn(DECODE, "cpu", 0, "normal")
    split = call.split(Decision("fav2", "emulation"), None, CPU)
    assert not split.quantizes
    assert split.moved_bytes == 2 * 2 * 120 * 2 * 32 + 2 * 2 * 3 * 4 * 32
    assert call.flops() == 4 * 4 * 32 * 120
    assert torch.equal(split.alone(), split.whole())
