"""Calls as models pass them: layouts, GQA, masks of all kinds, autocast, and what is no call."""

from __future__ import annotations

import pytest
import torch

from sage_plugin.capture.call import CanonicalCall, canonical
from sage_plugin.capture.selection.extract import extract
from sage_plugin.capture.selection.heads import PartRule
from sage_plugin.kernels.attention.mask import mask_kind, normalized
from tests.capture.toys import event


def made(call_event) -> CanonicalCall:
    call = canonical(call_event)
    assert isinstance(call, CanonicalCall), call
    return call


def saved(call_event, **rule) -> dict[str, torch.Tensor]:
    call = made(call_event)
    part = PartRule(10**9, **rule).choose(call)
    assert not isinstance(part, str), part
    tensors = extract(call, part)
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors.values())
    return tensors


def test_bshd_becomes_bhsd():
    q = torch.randn(2, 5, 3, 8)
    call = made(event(q, layout="bshd", is_causal=True, scale=0.25))
    shape = call.shape
    assert (shape.batch, shape.heads_q, shape.seq_q, shape.head_dim) == (2, 3, 5, 8)
    assert (shape.layout, shape.causal, shape.scale) == ("bshd", True, 0.25)
    assert torch.equal(saved(event(q, layout="bshd"))["q"], q.transpose(1, 2))


def test_default_scale_is_of_the_true_head_dim():
    assert made(event(torch.randn(1, 1, 2, 16))).shape.scale == 0.25


def test_three_views_of_one_buffer():
    """Reports 123 and G2: views of one packed qkv, transposed."""
    packed = torch.randn(2, 6, 3, 4, 8)  # (B, S, qkv, H, D)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    tensors = saved(event(q, k, v))
    assert torch.equal(tensors["q"], q)
    assert torch.equal(tensors["k"], k)
    assert torch.equal(tensors["v"], v)


def test_one_expanded_head_is_saved_once():
    """Reports 123 and G2: K and V of stride 0 along the heads."""
    q = torch.randn(1, 4, 6, 8)
    k, v = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    call_event = event(q, k.expand(1, 4, 6, 8), v.expand(1, 4, 6, 8))
    assert (made(call_event).shape.heads_q, made(call_event).shape.heads_k) == (4, 1)
    tensors = saved(call_event)
    assert tensors["q"].shape == (1, 4, 6, 8)
    assert torch.equal(tensors["k"], k)
    assert torch.equal(tensors["v"], v)


def test_expansion_of_k_alone_is_no_gqa():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 1, 6, 8).expand(1, 4, 6, 8)
    assert made(event(q, k, torch.randn(1, 4, 6, 8))).shape.heads_k == 4
    assert saved(event(q, k, torch.randn(1, 4, 6, 8)))["k"].shape == (1, 4, 6, 8)


def test_unexpanded_gqa_keeps_query_heads_with_their_key_head():
    q, k = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 5, 8)
    tensors = saved(event(q, k, k), heads=(1,))
    assert torch.equal(tensors["q"], q[:, 3:])
    assert torch.equal(tensors["k"], k[:, 1:])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_every_dtype_of_a_transposed_call(dtype):
    q = torch.randn(2, 5, 4, 8).to(dtype).transpose(1, 2)
    tensors = saved(event(q), heads=(0, 2), batch=(1,))
    assert tensors["q"].dtype == dtype
    assert torch.equal(tensors["q"].float(), q.float()[1:, [0, 2]])
    assert made(event(q)).shape.dtype == str(dtype).removeprefix("torch.")


def test_autocast_saves_what_attention_computes_with():
    """Under autocast the norms leave Q and K in fp32 while SDPA casts its inputs."""
    q, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(event(q, q, v)).shape.dtype == "bfloat16"
        tensors = saved(event(q, q, v))
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["q"], q.bfloat16())


def test_mixed_dtypes_are_kept():
    q, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8).half()
    assert saved(event(q, q, v))["v"].dtype == torch.float16


@pytest.mark.parametrize("size", [(2, 1, 1, 4), (1, 1, 1, 4), (2, 3, 1, 4), (1, 3, 1, 1)])
def test_key_masks_become_a_bias(size):
    q = torch.randn(2, 3, 5, 8)
    k = torch.randn(2, 3, 4, 8)
    keep = torch.rand(size) > 0.5
    call_event = event(q, k, k, mask=keep)
    assert made(call_event).shape.mask_kind == "key_bias"
    bias = saved(call_event)["key_bias"]
    expected = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
    assert bias.dtype == torch.float32
    assert torch.equal(bias[:, :, None].expand(*size[:3], 4), expected.expand(*size[:3], 4))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_an_expanded_mask_is_what_kernels_see_of_it(kind):
    """One row expanded over all rows is a key mask there, and is saved once."""
    q = torch.randn(2, 3, 5, 8)
    row = torch.rand(2, 1, 1, 5) > 0.5 if kind == "bool" else torch.randn(2, 1, 1, 5)
    call_event = event(q, mask=row.expand(2, 3, 5, 5))
    call = made(call_event)
    mask = normalized(call_event.attn_mask, batch=2, heads_q=3, seq_q=5, seq_k=5)
    assert call.shape.mask_kind == mask_kind(mask) == "key_bias"
    assert torch.equal(call.mask, row)
    assert saved(call_event)["key_bias"].shape == (2, 1, 5)
    dense = torch.rand(1, 1, 5, 5) > 0.5
    assert saved(event(q, mask=dense.expand(2, 3, 5, 5)))["attn_mask"].shape == (1, 1, 5, 5)


def test_additive_key_bias_of_chosen_heads():
    q = torch.randn(2, 4, 5, 8)
    bias = torch.randn(2, 4, 1, 5).half()
    tensors = saved(event(q, mask=bias), heads=(1, 3), batch=(0,))
    assert torch.equal(tensors["key_bias"], bias[:1, [1, 3], 0].float())


def test_a_two_dim_mask_means_what_its_caller_means():
    """diffusers' dispatcher reads (B, Sk) as key padding, SDPA reads (Sq, Sk)."""
    q = torch.randn(4, 4, 2, 8)  # B = S = 4 in bshd, which could be either
    mask = torch.rand(4, 4) > 0.5
    assert made(event(q, layout="bshd", mask=mask)).shape.mask_kind == "key_bias"
    dense = event(q.transpose(1, 2), mask=mask)
    assert made(dense).shape.mask_kind == "dense"
    assert torch.equal(saved(dense)["attn_mask"], mask[None, None])


def test_dense_masks_are_kept_as_they_are():
    q = torch.randn(2, 3, 5, 8)
    mask = torch.randn(2, 1, 5, 5).bfloat16()
    tensors = saved(event(q, mask=mask), batch=(1,))
    assert torch.equal(tensors["attn_mask"], mask[1:])


def test_gradients_do_not_come_along():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    assert not saved(event(q))["q"].requires_grad


@pytest.mark.parametrize(
    "call_event",
    [
        event(torch.randn(2, 4, 8)),
        event(torch.randn(1, 3, 4, 8), torch.randn(1, 2, 4, 8)),
        event(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 4)),
        event(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 4, 8)),
        event(torch.randn(1, 2, 0, 8)),
        event(torch.empty(1, 2, 4, 8, device="meta")),
        event(torch.randn(1, 2, 4, 8), mask=torch.zeros(1, 2, 3, 4)),
        event(torch.randn(1, 2, 4, 8), mask=torch.zeros(4)),
    ],
)
def test_what_is_no_attention_call_gets_a_reason(call_event):
    assert isinstance(canonical(call_event), str)


def test_tensor_subclasses_get_a_reason():
    class Ours(torch.Tensor):
        pass

    assert canonical(event(torch.randn(1, 2, 4, 8).as_subclass(Ours))) == "tensor subclass"
