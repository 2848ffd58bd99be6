"""Every emulation against the oracle, over a matrix of shapes, dtypes, layouts and masks."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_67_two_halves_of_k_merge_to_the_whole(kernel):
    q, k, v = draw(Shape(1, 4, 2, 50, 90, 64))
    k = k + 20
    options = {"kernel": kernel, "return_lse": True, "launch": launch()}
    whole, lse = sage_plugin.attention(q, k, v, **options)
    halves = [
        sage_plugin.attention(q, k[:, :, part], v[:, :, part], **options)
        for part in (slice(0, 40), slice(40, 90))
    ]
    total = torch.logaddexp(halves[0][1], halves[1][1])
    merged = sum(out * torch.exp(part - total)[..., None] for out, part in halves)
    assert relative_l1(merged, whole) < 2 * LIMITS[kernel]
    assert (total - lse).abs().max() < 0.1


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("value", [0.0, 1e-30, 3e4], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_report_49_constant_inputs_stay_finite_and_right(kernel, value, which):
    tensors = list(draw(Shape(1, 2, 2, 40, 70, 64), torch.bfloat16))
    tensors[which] = torch.full_like(tensors[which], value)
    out = sage_plugin.attention(*tensors, kernel=kernel, out_dtype=torch.float32)
    exact, _ = oracle(*tensors)
    assert torch.isfinite(out).all()
    assert (out - exact).abs().mean() <= LIMITS[kernel] * (exact.abs().mean() + 1e-6)


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_19_scale_is_from_the_true_head_dim(kernel):
    for dim in (8, 40, 72, 80, 88, 112):
        q, k, v = draw(Shape(1, 1, 1, 30, 60, dim))
        exact, _ = oracle(q * 3, k, v, scale=1 / math.sqrt(dim))
        out = sage_plugin.attention(q * 3, k, v, kernel=kernel)
        assert relative_l1(out, exact) < 2 * LIMITS[kernel]


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_94_scale_is_used(kernel):
    q, k, v = draw(Shape(1, 1, 1, 30, 60, 64))
    for scale in (0.5, -0.2, 0.0):
        exact, _ = oracle(q, k, v, scale=scale)
        out = sage_plugin.attention(q, k, v, kernel=kernel, scale=scale)
        assert (out - exact).abs().mean() < 2.5 * LIMITS[kernel] * v.abs().mean()


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_12_error_is_flat_over_legal_blocks(kernel):
    q, k, v = draw(Shape(1, 2, 2, 200, 300, 64))
    exact, _ = oracle(q, k, v)
    errors = [
        relative_l1(sage_plugin.attention(q, k, v, kernel=kernel, launch=launch(m, n)), exact)
        for m in (16, 64, 128)
        for n in (32, 64, 128, 256)
    ]
    assert max(errors) < 2 * min(errors) + 1e-6
