"""Compile what a call would launch, in a process that stands for its device."""

from __future__ import annotations

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.absent_device import BuildResources, resources
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Decision
from sage_plugin.schema import CallShape, DeviceFacts, LaunchConfig

LARGEST_MASK = 2**32
"""Elements of a mask beyond which it is left to the real call; smaller ones are never touched."""


def compile_call(
    shape: CallShape, decision: Decision, config: LaunchConfig, facts: DeviceFacts
) -> tuple[BuildResources, ...]:
    """Compile the launches of a call for the device that this process stands for.

    Nothing runs: tensors are of the call's size and are never written, so that they take no memory.

    Returns:
        What each kernel takes.

    Raises:
        Exception: whatever the compiler raises where it refuses.
    """
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
    with launch_graph.recording(only_compile=True) as recorder:
        operands = kernel.prepare(q, k, v, problem=problem, launch=config)
        getattr(kernel, "first_choice", kernel).launch(operands, return_lse=False)
    return tuple(resources(launch[-1]) for launch in recorder.launches)


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
