"""The host's attention: SDPA itself wherever SDPA means the same, bottom-right causal elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.backends.sdpa import HostKernel, host_attention
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import Shape, draw
from tests.matrix.definition import defined


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
