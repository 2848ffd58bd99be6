"""Masks of patched layers: taken by the kernels, or left to the host for a counted reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.call import MASK_DEVICE, MASK_SHAPE, TENSOR_SUBCLASS
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.patch import patch
from tests.plugin import toys
from tests.plugin.toys import Direct, Dispatching, Tagged, counts, only_reason, patched_toy, qkv

MASKS = [(24, 24), (2, 1, 1, 24), (2, 1, 24, 24), (2, 2, 24, 24), (1, 24)]


@pytest.mark.parametrize("processor", [Direct, Dispatching])
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "expanded"])
@pytest.mark.parametrize("kernel", ["sage", "fav2"])
def test_report_32_35_a_mask_is_honored_by_the_kernel(processor, shape, kind, kernel):
    layer, handle = patched_toy(processor, kernel=kernel)
    q, k, v = qkv()
    v[:, :, -1] = 1e3
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[..., :2], mask[..., -1] = True, False
    if kind == "float":
        mask = torch.linspace(-1, 1, 24).expand(shape).masked_fill(~mask, -torch.inf)
    elif kind == "expanded":
        mask = mask.expand(2, 2, 24, 24)
    out = layer(q, k, v, attn_mask=mask)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (out - exact).abs().sum() / exact.abs().sum() < 0.02
    assert torch.equal(out, attention(q, k, v, mask, kernel=kernel))
    assert counts(handle) == ({f"{kernel}:emulation": 1}, {})


def test_report_35_two_dimensions_are_key_padding_where_diffusers_reads_them_so():
    layer, handle = patched_toy(Dispatching)
    q, k, v = qkv()
    padding = torch.arange(24) < torch.tensor([[20], [9]])
    out = layer(q, k, v, attn_mask=padding)
    assert torch.equal(out, attention(q, k, v, padding[:, None, None], kernel="sage"))
    assert counts(handle) == ({"sage:emulation": 1}, {})
    layer, handle = patched_toy(Direct)
    with pytest.raises(RuntimeError):  # to SDPA they are (Sq, Sk)
        layer(q, k, v, attn_mask=padding)
    assert counts(handle) == ({}, {MASK_SHAPE: 1})


def outcome(attend, mask):
    """What a call gives, or the type and the text of what it raises."""
    try:
        return attend(*qkv(), attn_mask=mask)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.ones(24, 23), MASK_SHAPE),
        (torch.ones(3, 1, 1, 24), MASK_SHAPE),
        (torch.ones(1, 1, 1, 24, 24), MASK_SHAPE),
        (torch.ones(24, 24, dtype=torch.int32), FallbackReason(Fallback.MASK_DTYPE, "torch.int32")),
        (
            torch.ones(24, 24, dtype=torch.float64),
            FallbackReason(Fallback.MASK_DTYPE, "torch.float64"),
        ),
        (torch.ones(24, 24, device="meta"), MASK_DEVICE),
    ],
    ids=str,
)
def test_a_mask_that_no_kernel_takes_is_the_hosts(mask, reason):
    layer, handle = patched_toy()
    found, host = outcome(layer, mask), outcome(F.scaled_dot_product_attention, mask)
    if isinstance(host, torch.Tensor):
        assert (found.shape, found.device) == (host.shape, host.device)
        assert mask.is_meta or torch.equal(found, host)  # of a mask without data torch makes noise
    else:
        assert found == host
    assert counts(handle) == ({}, {reason: 1})


def test_a_mask_of_a_subclass_stays_with_the_host():
    layer, handle = patched_toy()
    layer(*qkv(), attn_mask=torch.zeros(24, 24).as_subclass(Tagged))
    assert only_reason(handle) == TENSOR_SUBCLASS


def test_report_95_a_mask_that_learns_goes_to_the_host():
    layer, handle = patched_toy()
    bias = torch.zeros(24, 24, requires_grad=True)
    layer(*qkv(), attn_mask=bias).square().sum().backward()
    assert bias.grad.abs().sum() > 0
    assert only_reason(handle).cause is Fallback.GRADIENT


def test_masked_layers_compile_as_one_graph():
    layer, _ = patched_toy(Dispatching)
    q, k, v = qkv()
    mask = torch.rand(2, 1, 1, 24) > 0.3
    with torch.no_grad():
        eager = layer(q, k, v, attn_mask=mask)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v, attn_mask=mask), eager)


def test_report_41_mask_and_causal_hold_together():
    """SDPA refuses the pair; nothing of it is dropped here."""
    layer, handle = patched_toy()
    q, k, v = qkv()
    padding = torch.arange(24) < 20
    both = padding & torch.ones(24, 24, dtype=torch.bool).tril()
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=both)
    out = layer(q, k, v, attn_mask=padding[None], is_causal=True)
    assert (out - exact).abs().sum() / exact.abs().sum() < 0.02
    assert counts(handle)[0] == {"sage:emulation": 1}


def test_report_41_mask_and_causal_reach_the_host_together(monkeypatch):
    seen = []
    monkeypatch.setattr(
        toys, "dispatch_attention_fn", lambda *a, **kw: seen.append((a, kw)) or a[0]
    )
    layer, _ = patched_toy(Dispatching)
    q, k, v = qkv()
    mask = torch.ones(24, 24, dtype=torch.bool)
    layer(q, k, v, attn_mask=mask, dropout_p=0.1, is_causal=True, scale=0.3)
    (args, _), = seen  # fmt: skip
    assert args[3] is mask
    assert args[4:] == (0.1, True, 0.3, False, None)
    monkeypatch.undo()
    patch(layer, kernel="sage", min_seq=0)  # takes the original function up again


@pytest.mark.parametrize(
    ("shape", "special"),
    [(None, False), ((2, 1, 1, 24), False), ((1, 2, 1, 24), True), ((2, 2, 24, 24), True)],
    ids=str,
)
def test_the_decision_is_told_of_a_mask_of_each_head(shape, special, monkeypatch):
    """Which the Hopper variants do not take."""
    stock, told = dispatch.decide, []

    def decide(*call, **named):
        told.append(named["special"])
        return stock(*call, **named)

    dispatch.forget()
    monkeypatch.setattr(dispatch, "decide", decide)
    layer, handle = patched_toy()
    mask = None if shape is None else torch.rand(shape) > 0.3
    layer(*qkv(), attn_mask=mask)
    assert told == [special]
    assert counts(handle) == ({"sage:emulation": 1}, {})
