"""From what was decided to the object that computes it, and to the form of its output."""

from __future__ import annotations

from typing import Any

import torch

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import Decision, Implementation
from sage_plugin.kernels.surroundings import can_bypass_dispatcher, on_device, without_autocast
from sage_plugin.schema import DeviceFacts

__all__ = [
    "as_promised",
    "built",
    "can_bypass_dispatcher",
    "empty_as",
    "on_device",
    "without_autocast",
]


def built(decision: Decision, facts: DeviceFacts) -> Implementation[Any]:
    """The implementation of what was decided, with the FP8 type of the device."""
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    return implementation(decision.kernel, decision.variant, fp8)


def as_promised(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The host's output in the memory order that the fakes tell a compiler of."""
    promised = empty_as(q, out.dtype, out.shape[-1])
    return out if out.stride() == promised.stride() else promised.copy_(out)


def empty_as(q: torch.Tensor, dtype: torch.dtype, dv: int) -> torch.Tensor:
    """An output in Q's memory order where it has Q's shape, packed or not; the fakes use it too."""
    if dv == q.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], dv), dtype=dtype)
