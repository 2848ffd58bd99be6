"""Calls that `auto` leaves to the host although a kernel could take them: the host is faster."""

from __future__ import annotations

import math

import pytest

from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from tests.kernels.test_dispatch import _alone, decide  # noqa: F401


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("mask_kind", ["none", "key_bias", "dense"])
@pytest.mark.parametrize("additive", [False, True], ids=["bool", "float"])
def test_auto_leaves_dense_additive_masks_to_the_host_and_a_named_kernel_takes_them(
    arch, mask_kind, additive
):
    chosen = decide(arch, mask_kind=mask_kind, additive=additive)
    left = additive and mask_kind == "dense"
    assert (chosen.reason == dispatch.DENSE_ADDITIVE_MASK) == left
    assert (chosen.kernel == "sdpa") == left
    named = decide(arch, "fav2", mask_kind=mask_kind, additive=additive)
    assert named == dispatch.Decision("fav2", "portable")


@pytest.mark.parametrize(
    ("dim", "fewest"), [(40, 5.5e10), (64, 5.5e10), (65, 1.5e11), (128, 1.5e11)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_auto_leaves_calls_of_few_operations_to_the_host_where_that_was_measured(
    dim, fewest, causal
):
    heads = 2 if causal else 8  # few, so that causal calls are long enough

    def asked(seq, **more):
        at = {"batch": 1, "heads_q": heads, "heads_k": heads, "head_dim": dim, "dv": dim}
        return decide(seq_q=seq, seq_k=seq, causal=causal, **(at | more))

    seq = math.isqrt(int(fewest / (4 * heads * dim) * (2 if causal else 1)))
    small, large = asked(seq - 1), asked(seq + 2)
    assert (small.kernel, small.reason) == ("sdpa", dispatch.TOO_SMALL)
    assert (large.kernel, large.reason) == ("fav3_sage", None)
    assert asked(seq - 1, batch=2).reason is None
    assert asked(seq - 1, kernel="fav3_sage").reason is None
    assert asked(seq - 1, arch="sm_120").reason is None


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shorter", ["seq_q", "seq_k"])
def test_auto_leaves_causal_calls_of_few_tokens_to_the_host_whatever_the_heads(dim, shorter):
    def asked(seq, **more):
        at = {"seq_q": 9000, "seq_k": 9000, "batch": 8, "heads_q": 32, "heads_k": 32}
        given = at | {"head_dim": dim, "dv": dim, "causal": True, shorter: seq} | more
        return decide(**given)

    assert asked(7167).reason == dispatch.TOO_SMALL
    assert asked(7168).reason is None
    for more in ({"causal": False}, {"arch": "sm_89"}, {"kernel": "fav3_sage"}):
        assert asked(7167, **more).reason is None
    assert asked(1199, causal=False, batch=64).reason == dispatch.TOO_SMALL
    assert asked(1200, causal=False, batch=64).reason is None


@pytest.mark.parametrize("causal", [False, True])
def test_auto_leaves_wide_heads_to_the_host_where_it_takes_the_call(causal):
    def asked(dim, **more):
        at = {"seq_q": 16384, "seq_k": 16384, "heads_q": 16, "heads_k": 8, "causal": causal}
        return decide(**(at | {"head_dim": dim, "dv": dim} | more))

    assert asked(256).reason == asked(129).reason == FallbackReason(Fallback.WIDE_HEADS, 128)
    assert asked(128).reason is None
    for more in ({"special": True}, {"arch": "sm_89"}, {"kernel": "fav3_sage"}):
        assert asked(256, **more).reason is None
