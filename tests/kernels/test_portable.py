"""Portable Triton kernels in the interpreter: the emulation's numbers, on small shapes."""

from __future__ import annotations

import math

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, draw, launch, relative_l1

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = [
    (Shape(1, 2, 2, 70, 70, 64), False, "bhsd", torch.float16),
    (Shape(1, 4, 2, 33, 65, 128), True, "bshd", torch.bfloat16),
    (Shape(1, 2, 1, 65, 33, 40), True, "bhsd", torch.float32),
    (Shape(2, 1, 1, 1, 31, 96), False, "bshd", torch.float16),
    (Shape(1, 1, 1, 5, 1, 16), False, "bhsd", torch.bfloat16),
]


@pytest.fixture
def nan_scratch(monkeypatch):
    """Fill what is allocated without a value with NaN, so that unwritten memory shows."""

    def poisoning(stock):
        def empty(*size, **options):
            out = stock(*size, **options)
            return _poisoned(out) if out.dim() and out.numel() and not out.is_meta else out

        return empty

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


def _poisoned(out):
    if out.dtype == torch.int8:
        return out.fill_(-128)
    if out.element_size() == 1:
        out.view(torch.uint8).fill_(0x7F)
        return out
    return out.fill_(math.nan if out.is_floating_point() else 1 << 30)


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize(("shape", "causal", "layout", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.usefixtures("nan_scratch")
def test_matches_the_emulation(kernel, shape, causal, layout, dtype, loads):
    if kernel == "fav2" and loads == "descriptor":
        pytest.skip("fav2 reads its inputs in place")
    q, k, v = draw(shape, dtype, layout=layout)
    before = [t.clone() for t in (q, k, v)]
    options = {
        "kernel": kernel,
        "is_causal": causal,
        "layout": layout,
        "return_lse": True,
        "out_dtype": torch.float32,
        "launch": launch(loads=loads),
    }
    out, lse = sage_plugin.attention(q, k, v, variant="portable", **options)
    twin, twin_lse = sage_plugin.attention(q, k, v, variant="emulation", **options)
    assert out.stride() == twin.stride()
    assert relative_l1(out, twin) < 3e-4
    dead = torch.isinf(twin_lse)
    assert torch.equal(torch.isinf(lse), dead)
    assert (lse - twin_lse)[~dead].abs().max() < 0.02
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


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


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_5_views_of_one_qkv_buffer_are_read_in_place(kernel):
    qkv = torch.randn(1, 40, 3, 2, 64, dtype=torch.float16)
    q, k, v = qkv.unbind(2)
    expected = sage_plugin.attention(
        *(t.contiguous() for t in (q, k, v)), kernel=kernel, variant="portable", layout="bshd",
        launch=launch(),
    )  # fmt: skip
    views = sage_plugin.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), kernel=kernel, variant="portable", launch=launch()
    )
    assert torch.equal(views.transpose(1, 2), expected)


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("block_n", [32, 64])
def test_report_22_every_tail_is_masked(kernel, block_n):
    for seq_k in (1, block_n - 1, block_n, block_n + 1, 2 * block_n + 1):
        q, k, v = draw(Shape(1, 1, 1, 16, seq_k, 32), torch.float16)
        storage = torch.full((1, 1, seq_k + 64, 32), math.nan, dtype=torch.float16)
        keys, values = storage.clone(), storage.clone()
        keys[:, :, :seq_k], values[:, :, :seq_k] = k, v
        options = {"kernel": kernel, "variant": "portable", "launch": launch(16, block_n)}
        expected = sage_plugin.attention(q, k, v, **options)
        out = sage_plugin.attention(q, keys[:, :, :seq_k], values[:, :, :seq_k], **options)
        assert torch.isfinite(out).all()
        assert torch.equal(out, expected)


def test_report_90_q_and_k_of_two_dtypes_are_multiplied_in_that_of_q():
    q, k, v = draw(Shape(1, 1, 1, 20, 40, 32))
    options = {"kernel": "fav2", "launch": launch()}
    out = sage_plugin.attention(q, k.half(), v.half(), variant="portable", **options)
    twin = sage_plugin.attention(q, k.half(), v.half(), variant="emulation", **options)
    assert out.dtype == torch.float16
    assert relative_l1(out, twin) < 1e-3


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


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("variant", ["portable", "emulation"])
def test_what_is_not_finite_is_seen(kernel, value, which, variant):
    tensors = list(draw(Shape(1, 1, 1, 20, 40, 32), torch.float16))
    tensors[which][0, 0, 3, 5] = value
    out, lse = sage_plugin.attention(
        *tensors, kernel=kernel, variant=variant, return_lse=True, launch=launch()
    )
    assert not torch.isfinite(out).all()
    assert which == 2 or not torch.isfinite(lse).all()
