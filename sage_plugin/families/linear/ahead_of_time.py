"""Launch what a linear would launch, to compile it ahead of time."""

from __future__ import annotations

import torch

from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.linear.call import LinearCall
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.measure.inputs import torch_dtype
from sage_plugin.schema import DeviceFacts, LinearLaunch, LinearShape


def launch_all(
    shape: LinearShape, decision: Decision, config: LinearLaunch, facts: DeviceFacts
) -> None:
    """Make the launches of a call of a shape, on tensors that are never written."""
    from sage_plugin.kernels.linear.backends.triton.products import multiply_triton
    from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton

    x = empty_call(shape).x
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    form = row_format(decision.kernel, fp8=fp8)
    data = torch.empty(shape.out_features, shape.in_features, dtype=form.dtype)
    scale = torch.empty(()) if form.per_tensor else torch.empty(shape.out_features)
    weight = QuantizedWeight(data, scale, decision.kernel)
    rows_scale = torch.empty(()) if form.per_tensor else torch.empty(shape.rows, 1)
    rows = QuantizedRows(torch.empty(x.shape, dtype=form.dtype), rows_scale)
    if not form.per_tensor:  # whose quantizer asks torch for the largest value
        quantize_rows_triton(x, form)
    multiply_triton(rows, weight, None, x.dtype, config)


def empty_call(shape: LinearShape) -> LinearCall:
    """Return a call of a shape whose contents are of no meaning."""
    dtype = torch_dtype(shape.dtype)
    x = torch.empty(shape.rows, shape.in_features, dtype=dtype)
    return LinearCall(x, torch.empty(shape.out_features, shape.in_features, dtype=dtype))
