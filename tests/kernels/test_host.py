"""The host's attention: SDPA itself wherever SDPA means the same, bottom-right causal elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.backends.sdpa import HostKernel, host_attention
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.contract import AttentionParams, bhsd
from tests.kernels.calls import Shape, draw
from tests.matrix.definition import defined


def masked(q, k, v, keep, scale=None):
    """Attention in fp64 with an explicit mask of what each row sees; dead rows are 0."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[3]))
    weights = torch.softmax(scores.masked_fill(~keep, -math.inf), -1)
    return torch.nan_to_num(weights) @ v


def bottom_right(seq_q, seq_k):
    """Key j is visible to query i if j <= i + Sk - Sq."""
    return torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_sdpa_bit_for_bit_where_lengths_agree(causal, dtype, scale):
    q, k, v = draw(Shape(2, 2, 2, 40, 40, 32), dtype)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    assert torch.equal(host_attention(q, k, v, is_causal=causal, scale=scale), expected)


def test_masks_and_grouped_heads_go_to_sdpa_as_they_are():
    q, k, v = draw(Shape(1, 4, 2, 20, 30, 16))
    for mask in (torch.rand(1, 1, 20, 30) > 0.5, torch.randn(4, 20, 30), torch.randn(1, 1, 1, 30)):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        assert torch.equal(host_attention(q, k, v, mask), expected)
        assert torch.equal(host_attention(q, k, v, mask, enable_gqa=True), expected)


def test_dropout_goes_to_sdpa():
    q, k, v = draw(Shape(1, 2, 2, 20, 30, 16))
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(host_attention(q, k, v, None, 0.5), expected)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 12), (12, 5), (1, 9), (9, 1), (7, 8), (8, 7)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_report_17_causal_is_bottom_right_and_dead_rows_are_zero(seq_q, seq_k, layout):
    q, k, v = draw(Shape(2, 4, 2, seq_q, seq_k, 16))
    expected = masked(q, k, v, bottom_right(seq_q, seq_k))
    given = [x if layout == "bhsd" else x.transpose(1, 2) for x in (q, k, v)]
    out = host_attention(*given, is_causal=True, layout=layout)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    dead = max(0, seq_q - seq_k)
    assert (out[:, :, :dead] == 0).all()
    assert (out[:, :, dead:] != 0).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seq_q=st.integers(1, 12),
    seq_k=st.integers(1, 12),
    boolean=st.booleans(),
    seed=st.integers(0, 99),
)
def test_report_41_a_mask_beside_causal_is_honored(seq_q, seq_k, boolean, seed):
    q, k, v = draw(Shape(1, 2, 2, seq_q, seq_k, 8), seed=seed)
    keep = torch.rand(1, 1, seq_q, seq_k, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask = keep if boolean else torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    before = mask.clone()
    out = host_attention(q, k, v, mask, is_causal=True)
    expected = masked(q, k, v, keep & bottom_right(seq_q, seq_k))
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.equal(mask, before)


def test_report_41_a_finite_bias_beside_causal_is_added():
    q, k, v = draw(Shape(1, 2, 2, 6, 9, 8))
    bias = torch.randn(6, 9)
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(8) + bias
    weights = torch.softmax(scores.masked_fill(~bottom_right(6, 9), -math.inf), -1)
    out = host_attention(q, k, v, bias, is_causal=True)
    assert torch.allclose(out.double(), weights @ v.double(), atol=1e-5)


def test_a_gradient_flows_through_it():
    q, k, v = (x.requires_grad_() for x in draw(Shape(1, 2, 2, 5, 3, 8)))
    host_attention(q, k, v, is_causal=True).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert (q.grad[:, :, :2] == 0).all()
    assert v.grad.abs().sum() > 0


def test_a_gradient_flows_through_a_softcap_and_sinks():
    q, k, v = (x.requires_grad_() for x in draw(Shape(1, 2, 2, 5, 3, 8)))
    sinks = torch.zeros(2, requires_grad=True)
    host_attention(q, k, v, is_causal=True, softcap=2.0, sinks=sinks).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v, sinks))
    assert (q.grad[:, :, :2] == 0).all()
    assert sinks.grad.abs().min() > 0


def test_fp64_stays_fp64_under_a_softcap_and_sinks():
    q, k, v = (x.double() for x in draw(Shape(1, 2, 2, 5, 7, 8)))
    problem = AttentionParams(0.25, True, "bhsd", softcap=2.0, sinks=torch.ones(2))
    out = host_attention(q, k, v, is_causal=True, scale=0.25, softcap=2.0, sinks=torch.ones(2))
    assert out.dtype == torch.float64
    assert torch.allclose(out, defined(q, k, v, problem)[0], rtol=1e-12, atol=1e-13)


def test_dropout_beside_a_softcap_or_sinks_is_refused():
    q, k, v = draw(Shape(1, 2, 2, 5, 5, 8))
    for options in ({"softcap": 2.0}, {"sinks": torch.zeros(2)}):
        with pytest.raises(UnsupportedInputError, match=r"dropout_p is 0\.5"):
            host_attention(q, k, v, None, 0.5, **options)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", [(70,), (40, 70), (4, 1, 70), (2, 1, 40, 70), (1, 4, 1, 1)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_report_35_masks_broadcast_as_in_sdpa(layout, shape, softcap):
    q, k, v = draw(Shape(2, 4, 2, 40, 70, 16))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    problem = AttentionParams(0.25, True, "bhsd", mask.expand(2, 4, 40, 70), (50, -1), softcap)
    expected, _ = defined(q, k, v, problem)
    given = [x if layout == "bhsd" else x.transpose(1, 2) for x in (q, k, v)]
    out = host_attention(
        *given, mask, is_causal=True, layout=layout, window=(50, -1), softcap=softcap
    )
    assert torch.allclose(bhsd(out, layout).double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float_masks_of_any_dtype(dtype, mask_dtype):
    q, k, v = draw(Shape(1, 2, 2, 6, 9, 16), dtype)
    bias = torch.randn(1, 1, 6, 9, generator=torch.Generator().manual_seed(2))
    bias[..., 3] = -math.inf
    bias[..., 4, :] = -math.inf
    bias[..., 5, :] = torch.finfo(mask_dtype).min
    bias = bias.to(mask_dtype)
    out = host_attention(q, k, v, bias)
    expected, _ = defined(q, k, v, AttentionParams(0.25, False, "bhsd", bias))
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert (out[:, :, 4] == 0).all()
    assert torch.allclose(out[:, :, :5].double(), expected[:, :, :5], atol=0.04)
    if mask_dtype != torch.float16:  # whose lowest value is a bias as any other
        assert (out[:, :, 5] == 0).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_as_a_kernel_it_returns_the_lse_of_the_oracle(layout):
    q, k, v = draw(Shape(2, 4, 2, 20, 30, 16), torch.bfloat16, layout=layout)
    kernel = HostKernel()
    operands = kernel.prepare(q, k, v, problem=AttentionParams(0.2, True, layout), launch=None)
    out, lse = kernel.launch(operands, return_lse=True)
    exact, exact_lse = oracle(q, k, v, is_causal=True, scale=0.2, layout=layout)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), exact, atol=0.02)
    assert torch.equal(lse, exact_lse)
    assert lse.is_contiguous()
    wide, none = kernel.launch(operands, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert none is None
