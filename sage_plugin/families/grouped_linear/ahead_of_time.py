"""Launch what a grouped linear would launch, to compile it ahead of time."""

from __future__ import annotations

import torch

from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.operands import GroupedOperands
from sage_plugin.kernels.linear.dispatch import BASELINE
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.measure.inputs import torch_dtype
from sage_plugin.schema import DeviceFacts, LinearLaunch, LinearShape


def launch_all(
    shape: LinearShape, decision: Decision, config: LinearLaunch, facts: DeviceFacts
) -> None:
    """Make the launches of a call of a shape, on tensors that are never written."""
    from sage_plugin.kernels.grouped_linear.backends.triton.products import multiply_groups_triton
    from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton

    call = empty_call(shape)
    x, weights, sizes = call.data, call.matrices, call.group_sizes
    operands = GroupedOperands(x, None, weights, None, sizes, None)
    if decision.kernel != BASELINE:
        fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
        form = row_format(decision.kernel, fp8=fp8)
        quantize_rows_triton(x, form)
        operands = GroupedOperands(
            torch.empty(x.shape, dtype=form.dtype), torch.empty(shape.rows, 1),
            torch.empty(weights.shape, dtype=form.dtype), torch.empty(weights.shape[:2]),
            sizes, None,
        )  # fmt: skip
    multiply_groups_triton(operands, x.dtype, config)


def empty_call(shape: LinearShape) -> GroupedLinearCall:
    """Return a call of a shape whose contents are of no meaning."""
    dtype = torch_dtype(shape.dtype)
    return GroupedLinearCall(
        torch.empty(shape.rows, shape.in_features, dtype=dtype),
        torch.empty(shape.groups, shape.out_features, shape.in_features, dtype=dtype),
        torch.empty(shape.groups, dtype=torch.int32),
    )
