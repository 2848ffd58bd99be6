"""Every emulation, and torch's own kernels, against the definition on drawn problems."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sage_plugin
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import EMULATED, LIMITS, QUANTIZED, Shape, draw, launch, relative_l1
from tests.kernels.problems import packed_of, problems, run
from tests.matrix.definition import defined, seen_by

HOSTS = ("torch", "sdpa")
LIMIT = {**LIMITS, "torch": 1e-5, "sdpa": 1e-5, "fav2": 1e-5}
LSE_LIMIT = {"torch": 3e-5, "sdpa": 3e-5, "fav2": 3e-5, "sage": 0.15, "fav3_sage": 0.15}


def check(kernel, q, k, v, problem, *, limit=1.0, **fields):
    """Output and LSE within the kernel's limit, and the dead rows exactly as the contract has."""
    out, lse = run(kernel, q, k, v, problem, **fields)
    expected, expected_lse = defined(q, k, v, problem)
    seen = seen_by(problem, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    dead = ~seen.any(-1)
    assert (out[dead] == 0).all()
    sink = problem.sinks
    at_dead = torch.full_like(lse, -math.inf) if sink is None else sink[:, None].expand_as(lse)
    assert torch.allclose(lse[dead], at_dead[dead].float(), rtol=1e-6)
    if not dead.all():
        # The floor keeps calls of a few keys, whose outputs may nearly cancel, from being judged.
        error = (out - expected).abs().mean() / (expected.abs().mean() + 0.3 * v.float().std())
        assert error < limit * LIMIT[kernel]
        assert (lse - expected_lse)[~dead].abs().max() < limit * LSE_LIMIT.get(kernel, 0.3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(made=problems(), kernel=st.sampled_from(HOSTS))
def test_the_host_and_the_oracle_are_exact(made, kernel):
    shape, problem = made
    check(kernel, *draw(shape), problem)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    made=problems(),
    kernel=st.sampled_from(EMULATED),
    block_n=st.sampled_from([16, 32, 64, 128]),
    smooth=st.booleans(),
)
def test_emulations_are_within_their_limits(made, kernel, block_n, smooth):
    shape, problem = made
    q, k, v = draw(shape)
    # K has a bias of each channel; without smoothing its scale is coarser by as much.
    check(kernel, q, k, v, problem, limit=2.0 if smooth else 6.0, block_n=block_n,
          smooth_k=smooth, smooth_v=smooth)  # fmt: skip


@pytest.mark.parametrize("kernel", QUANTIZED)
@pytest.mark.parametrize("packed", [False, True])
def test_operands_do_not_keep_the_inputs_alive(kernel, packed):
    q, k, v = draw(Shape(1, 2, 2, 20, 20, 64), torch.float16, layout="bshd")
    bounds = packed_of([0, 7, 20], [0, 7, 20]) if packed else None
    built = implementation(kernel, "emulation")
    problem = AttentionParams(0.125, True, "bshd", packed=bounds)
    operands = built.prepare(q, k, v, problem=problem, launch=launch())
    out, lse = built.launch(operands, return_lse=True)
    storages = [weakref.ref(x.untyped_storage()) for x in (q, k, v)]
    alive = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    assert all(ref() is None for ref in (*alive, *storages))
    again, lse_again = built.launch(operands, return_lse=True)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def smoothed_or_not(kernel, q, k, v, field):
    """A kernel with and without a field, and what is exact."""
    configs = (launch(**{field: flag}) for flag in (True, False))
    found = (sage_plugin.attention(q, k, v, kernel=kernel, launch=config) for config in configs)
    return (*found, oracle(q, k, v)[0])


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_smoothing_leaves_exact_attention_alone_and_helps_a_biased_k(kernel):
    q, k, v = draw(Shape(1, 2, 2, 120, 120, 64))
    smooth, rough, exact = smoothed_or_not(kernel, q, k + 100.0, v, "smooth_k")
    assert relative_l1(smooth, exact) < LIMITS[kernel]
    assert relative_l1(rough, exact) > 3 * relative_l1(smooth, exact)


@pytest.mark.parametrize("kernel", ["fav3_sage", "fav3_fp8"])
def test_v_smoothing_helps_a_biased_v(kernel):
    q, k, v = draw(Shape(1, 2, 2, 120, 120, 64))
    smooth, rough, exact = (
        out - 20.0 - v.mean(2, keepdim=True)
        for out in smoothed_or_not(kernel, q, k, v + 20.0, "smooth_v")
    )
    assert relative_l1(smooth, exact) < 0.1
    assert relative_l1(rough, exact) > 5 * relative_l1(smooth, exact)
