"""Portable Triton kernels in the interpreter: the emulation's numbers, on small shapes."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import QUANTIZED, Shape, draw, launch, relative_l1

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_quantized_operands_are_the_twins(kernel):
    shape = Shape(1, 4, 2, 50, 70, 40)
    q, k, v = draw(shape, torch.float16)
    config, problem = launch(), AttentionParams(0.2, False, "bhsd")
    made = implementation(kernel, "portable").prepare(q, k, v, problem=problem, launch=config)
    twin = implementation(kernel, "emulation").prepare(q, k, v, problem=problem, launch=config)
    [twin] = twin.sequences
    width, rows = made.q8.shape[-1], made.k8.shape[1]
    q8 = made.q8.view(1, 4, -1, width)
    assert torch.allclose(made.q_scale.view(1, 4, -1)[:, :, :50], twin.queries.scale, rtol=1e-6)
    assert _steps(q8[:, :, :50, :40], twin.queries.values) < 1e-3
    assert (q8[..., 40:].float() == 0).all()
    k8 = made.k8.view(1, 2, rows, width)
    assert _steps(k8[..., :40], twin.keys.values.reshape(1, 2, rows, 40)) < 1e-3
    assert (k8[:, :, 70:].float() == 0).all()
    assert torch.allclose(made.v_scale.view(1, 2, -1)[..., :40], twin.values.scale, rtol=1e-5)
    v8 = made.v8
    if kernel != "sage":
        order = torch.arange(rows)
        order = order // 16 * 16 + order % 16 // 4 * 2 + order % 4 // 2 * 8 + order % 2
        assert sorted(order.tolist()) == list(range(rows))
        natural = torch.empty_like(v8.transpose(1, 2).float())
        natural[:, order] = v8.transpose(1, 2).float()
        v8 = natural
    values = twin.values.values.reshape(2, rows, 40)
    assert _steps(v8[..., :40], values) < 1e-3


def _steps(made, twin):
    """Share of values that differ; a quotient on a rounding tie may fall either way."""
    return (made.float() != twin.float()).double().mean().item()


def both_variants(kernel, q, k, v, **options):
    options = {"kernel": kernel, "return_lse": True, "out_dtype": torch.float32} | options
    return tuple(
        sage_plugin.attention(q, k, v, variant=variant, **options)
        for variant in ("portable", "emulation")
    )


def far_apart(kind):
    """Calls in which a hidden block's scale says nothing about the scores that are visible."""
    sign = torch.where(torch.rand(64, generator=torch.Generator().manual_seed(1)) > 0.5, 1.0, -1.0)
    q, k, v = draw(Shape(1, 1, 1, 128, 128, 64))
    k = k - k.mean(2, keepdim=True)
    if kind == "a negative row before small keys":
        k = 0.01 * k
        k[:, :, :32] = -4.0 * sign
        q = q.abs() * sign
    elif kind == "scores beyond fp8 products":
        q = 5.0 * sign * (1 + 0.05 * q)
        k = torch.where(torch.arange(128)[:, None] < 64, -5.0, 5.0) * sign + 0 * k
    return q, k, v


@pytest.mark.parametrize("kernel", QUANTIZED)
@pytest.mark.parametrize("kind", ["a negative row before small keys", "scores beyond fp8 products"])
def test_hidden_keys_never_outweigh_visible_ones(kernel, kind):
    q, k, v = far_apart(kind)
    config = launch(128, 32, smooth_k=False)
    (out, lse), (twin, twin_lse) = both_variants(kernel, q, k, v, is_causal=True, launch=config)
    assert torch.isfinite(twin_lse).all()
    assert torch.allclose(lse, twin_lse, atol=0.05, rtol=1e-4)
    assert relative_l1(out, twin) < 2e-3
    tail = slice(0, 97)
    (out, _), (twin, _) = both_variants(kernel, q, k[:, :, tail], v[:, :, tail], launch=config)
    assert relative_l1(out, twin) < 2e-3
