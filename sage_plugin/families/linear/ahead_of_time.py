"""Compile what a linear would launch, in a process that stands for its device."""

from __future__ import annotations

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.absent_device import BuildResources, resources
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.kernels.linear.weight import QuantizedWeight
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
    from sage_plugin.kernels.linear.backends.triton.products import multiply_triton
    from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton

    dtype = torch_dtype(shape.dtype)
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    form = row_format(decision.kernel, fp8=fp8)
    x = torch.empty(shape.rows, shape.in_features, dtype=dtype)
    data = torch.empty(shape.out_features, shape.in_features, dtype=form.dtype)
    scale = torch.empty(()) if form.per_tensor else torch.empty(shape.out_features)
    weight = QuantizedWeight(data, scale, decision.kernel)
    rows_scale = torch.empty(()) if form.per_tensor else torch.empty(shape.rows, 1)
    rows = QuantizedRows(torch.empty(x.shape, dtype=form.dtype), rows_scale)
    with launch_graph.recording(only_compile=True) as recorder:
        if not form.per_tensor:  # whose quantizer asks torch for the largest value
            quantize_rows_triton(x, form)
        multiply_triton(rows, weight, None, dtype, config)
    return tuple(resources(launch[-1]) for launch in recorder.launches)
