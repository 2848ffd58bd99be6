"""Attention modules without a model around them, for calls that no tiny model makes.

Each processor reaches attention in another way; `ToyAttention` passes its arguments through.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sage_plugin.plugin.patch import PatchHandle, patch


class ToyAttention(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.processor(self, *args, **kwargs)


class Direct:
    """The usual way."""

    def __call__(self, attn, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)


class Imported:
    def __call__(self, attn, q, k, v, **options):
        return scaled_dot_product_attention(q, k, v, **options)


class SpelledOut:
    def __call__(self, attn, q, k, v, **options):
        q = torch.cat([q[:, :1], q[:, 1:]], 1)  # torch itself is stood in for here
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


class ByHelpers:
    """The call is two functions down, which call each other."""

    def __call__(self, attn, q, k, v, **options):
        return _outer(2, q, k, v, options)


class ByMethod:
    def __call__(self, attn, q, k, v, **options):
        return self.attend(q, k, v, options)

    @staticmethod
    def attend(q, k, v, options):
        return F.scaled_dot_product_attention(q, k, v, **options)


class BySuper(Direct):
    """As somebody's class around one of diffusers'."""

    def __call__(self, attn, q, k, v, **options):
        return super().__call__(attn, q, k, v, **options)


class InClosure:
    def __call__(self, attn, q, k, v, **options):
        def inner():
            return F.scaled_dot_product_attention(q, k, v, **options)

        return inner()


class ModuleProcessor(nn.Module):
    """With a weight, as IP-Adapter's."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def __call__(self, attn, q, k, v, **options):
        return self.gain * F.scaled_dot_product_attention(q, k, v, **options)


class ThreeCalls:
    def __call__(self, attn, q, k, v, **options):
        return sum(F.scaled_dot_product_attention(q, k, v, **options) for _ in range(3))


class ByProduct:
    """Multiplies by itself: nothing to redirect."""

    def __call__(self, attn, q, k, v, **options):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def dispatch_attention_fn(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, attention_kwargs=None, *, backend=None, parallel_config=None, window=None,
):  # fmt: skip
    """The signature of diffusers' own, and one argument of tomorrow."""
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), scale=scale, enable_gqa=enable_gqa,
        **options,
    )  # fmt: skip
    return out.transpose(1, 2)


class Dispatching:
    """The way of the newer models, (B, S, H, D)."""

    def __call__(self, attn, q, k, v, **options):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return dispatch_attention_fn(q, k, v, **options).transpose(1, 2)


WAYS = (
    Direct,
    Imported,
    SpelledOut,
    ByHelpers,
    ByMethod,
    BySuper,
    InClosure,
    ModuleProcessor,
    Dispatching,
)


def qkv(heads=2, kv_heads=None, seq=24, kv_seq=None, dim=16, dtype=torch.float32):
    """Random Q, K and V in (B, H, S, D)."""
    draw = torch.Generator().manual_seed(3)
    kv_shape = (2, kv_heads or heads, kv_seq or seq, dim)
    shapes = ((2, heads, seq, dim), kv_shape, kv_shape)
    return tuple(torch.randn(s, generator=draw).to(dtype) for s in shapes)


def _outer(depth, q, k, v, options):
    return _inner(depth, q, k, v, options)


def _inner(depth, q, k, v, options):
    if depth:
        return _outer(depth - 1, q, k, v, options)
    return F.scaled_dot_product_attention(q, k, v, **options)


class Tagged(torch.Tensor):
    pass


def patched_toy(processor=Direct, **options):
    layer = ToyAttention(processor())
    handle = patch(layer, **{"kernel": "sage", "min_seq": 0, **options})
    return layer, handle


def counts(handle):
    (row,) = handle.report().rows
    return row.calls, row.fallbacks


def only_reason(handle):
    calls, fallbacks = counts(handle)
    assert calls == {}
    ((reason, count),) = fallbacks.items()
    assert count == 1
    return reason


def sage(module: nn.Module) -> PatchHandle:
    """Patch a module with `sage`, whatever the lengths."""
    return patch(module, kernel="sage", min_seq=0)


def processors(module: nn.Module) -> list[Any]:
    return [m.processor for m in module.modules() if hasattr(m, "processor")]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def generated(module: nn.Module) -> list[str]:
    """Attention modules and processors that are of our classes; norms are not among them."""
    found = [*module.modules(), *processors(module)]
    ours = [type(x).__name__ for x in found if hasattr(type(x), "_sage_original")]
    return [name for name in ours if not name.endswith("Norm")]
