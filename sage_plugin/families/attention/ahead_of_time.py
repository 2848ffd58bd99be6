"""Launch what a call would launch, to compile it ahead of time."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Decision
from sage_plugin.schema import CallShape, DeviceFacts, LaunchConfig

LARGEST_MASK = 2**32
"""Elements of a mask beyond which it is left to the real call; smaller ones are never touched."""


def launch_all(
    shape: CallShape, decision: Decision, config: LaunchConfig, facts: DeviceFacts
) -> None:
    """Make the launches of a call of a shape, on tensors that are never written."""
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    kernel = implementation(decision.kernel, decision.variant, fp8)
    q, k, v = (
        _tensor(shape, heads, seq, dim)
        for heads, seq, dim in (
            (shape.heads_q, shape.seq_q, shape.head_dim),
            (shape.heads_k, shape.seq_k, shape.head_dim),
            (shape.heads_k, shape.seq_k, shape.dv),
        )
    )
    mask = _mask(shape)
    problem = AttentionParams(shape.scale, shape.causal, shape.layout, mask, lse=False)
    operands = kernel.prepare(q, k, v, problem=problem, launch=config)
    getattr(kernel, "first_choice", kernel).launch(operands, return_lse=False)


def _tensor(shape: CallShape, heads: int, seq: int, dim: int) -> torch.Tensor:
    """A tensor of zeros in the call's layout, of pages that nobody touches."""
    bhsd = shape.layout == "bhsd"
    size = (shape.batch, heads, seq, dim) if bhsd else (shape.batch, seq, heads, dim)
    return torch.empty(size, dtype=getattr(torch, shape.dtype))


def _mask(shape: CallShape) -> torch.Tensor | None:
    if shape.mask_kind == "none":
        return None
    rows = shape.seq_q if shape.mask_kind == "dense" else 1
    if shape.batch * rows * shape.seq_k > LARGEST_MASK:
        raise MemoryError("the mask is too large to compile for ahead of time")
    return torch.empty(shape.batch, 1, rows, shape.seq_k, dtype=torch.bool)
