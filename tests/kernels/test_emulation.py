"""Every emulation against the oracle, over a matrix of shapes, dtypes, layouts and masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sage_plugin
from sage_plugin.kernels.attention.oracle import oracle
from tests.kernels.calls import EMULATED, LIMITS, QUANTIZED, Shape, draw, launch, relative_l1


@st.composite
def shapes(make):
    heads_k = make(st.integers(1, 2))
    return Shape(
        batch=make(st.integers(1, 2)),
        heads_q=heads_k * make(st.integers(1, 3)),
        heads_k=heads_k,
        seq_q=make(st.integers(1, 140)),
        seq_k=make(st.integers(1, 140)),
        dim=make(st.sampled_from([8, 40, 64, 96, 128])),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=shapes(),
    kernel=st.sampled_from(EMULATED),
    causal=st.booleans(),
    layout=st.sampled_from(["bhsd", "bshd"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    block_n=st.sampled_from([32, 64, 128]),
)
def test_within_its_limit_of_the_oracle(shape, kernel, causal, layout, dtype, block_n):
    q, k, v = draw(shape, dtype, layout=layout)
    before = [t.clone() for t in (q, k, v)]
    out, lse = sage_plugin.attention(
        q, k, v, is_causal=causal, kernel=kernel, layout=layout, return_lse=True,
        out_dtype=torch.float32, launch=launch(block_n=block_n),
    )  # fmt: skip
    exact, exact_lse = oracle(q, k, v, is_causal=causal, layout=layout)
    assert out.shape == q.shape
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    dead = torch.isinf(exact_lse)
    rows = out if layout == "bhsd" else out.transpose(1, 2)
    assert torch.equal(torch.isinf(lse), dead)
    assert (rows[dead] == 0).all()
    if not dead.all():
        # The floor keeps calls of a few keys, whose outputs may nearly cancel, from being judged.
        spread = v.float().std() if v.numel() > 1 else torch.tensor(1.0)
        error = (out - exact).abs().mean() / (exact.abs().mean() + 0.3 * spread)
        assert error < LIMITS[kernel]
        assert (lse - exact_lse)[~dead].abs().max() < 0.15
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_smoothing_leaves_exact_attention_alone_and_helps_a_biased_k(kernel):
    q, k, v = draw(Shape(1, 2, 2, 120, 120, 64))
    k = k + 100.0
    exact, _ = oracle(q, k, v)
    smooth, rough = (
        sage_plugin.attention(q, k, v, kernel=kernel, launch=launch(smooth_k=flag))
        for flag in (True, False)
    )
    assert relative_l1(smooth, exact) < LIMITS[kernel]
    assert relative_l1(rough, exact) > 3 * relative_l1(smooth, exact)


@pytest.mark.parametrize("kernel", ["fav3_sage", "fav3_fp8"])
def test_v_smoothing_helps_a_biased_v(kernel):
    q, k, v = draw(Shape(1, 2, 2, 120, 120, 64))
    v = v + 20.0
    exact, _ = oracle(q, k, v)
    smooth, rough = (
        sage_plugin.attention(q, k, v, kernel=kernel, launch=launch(smooth_v=flag))
        for flag in (True, False)
    )
    mean = v.mean(2, keepdim=True)
    assert relative_l1(smooth - mean, exact - mean) < 0.1
    assert relative_l1(rough - mean, exact - mean) > 5 * relative_l1(smooth - mean, exact - mean)
