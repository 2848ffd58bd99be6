"""Compile what a grouped linear would launch, in a process that stands for its device."""

from __future__ import annotations

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.absent_device import BuildResources, resources
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.grouped_linear.operands import GroupedOperands
from sage_plugin.kernels.linear.dispatch import BASELINE
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.measure.inputs import torch_dtype
from sage_plugin.schema import DeviceFacts, LinearLaunch, LinearShape


def compile_call(
    shape: LinearShape, decision: Decision, config: LinearLaunch, facts: DeviceFacts
) -> tuple[BuildResources, ...]:
    """Compile the launches of a call for the device that this process stands for.

    Nothing runs: tensors are of the call's size and are never written, so that they take no memory.

    Returns:
        What each kernel takes; nothing for a product of torch's.

    Raises:
        Exception: whatever the compiler raises where it refuses.
    """
    if decision.variant != "triton":
        return ()
    from sage_plugin.kernels.grouped_linear.backends.triton.products import multiply_groups_triton
    from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton

    dtype = torch_dtype(shape.dtype)
    x = torch.empty(shape.rows, shape.in_features, dtype=dtype)
    weights = torch.empty(shape.groups, shape.out_features, shape.in_features, dtype=dtype)
    sizes = torch.empty(shape.groups, dtype=torch.int32)
    operands = GroupedOperands(x, None, weights, None, sizes, None)
    with launch_graph.recording(only_compile=True) as recorder:
        if decision.kernel != BASELINE:
            fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
            form = row_format(decision.kernel, fp8=fp8)
            quantize_rows_triton(x, form)
            operands = GroupedOperands(
                torch.empty(x.shape, dtype=form.dtype), torch.empty(shape.rows, 1),
                torch.empty(weights.shape, dtype=form.dtype), torch.empty(weights.shape[:2]),
                sizes, None,
            )  # fmt: skip
        multiply_groups_triton(operands, dtype, config)
    return tuple(resources(launch[-1]) for launch in recorder.launches)
