"""Torch's own grouped products: `_grouped_mm` and `_scaled_grouped_mm`; traceable."""

from __future__ import annotations

import torch

from sage_plugin.kernels.grouped_linear.operands import GroupedOperands, ends_of, zero_tail

STRIDE_BYTES = 16
"""Rows of the operands begin at multiples of it."""


def multiply_groups_torch(operands: GroupedOperands, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply rows with the weight of their group by torch's own products, `(T, N)`."""
    x, x_scale, weights, w_scale, group_sizes, bias = operands
    ends = ends_of(group_sizes, x.shape[0])
    columns = weights.transpose(1, 2)
    if x_scale is None or w_scale is None:
        out = torch._grouped_mm(x, columns, offs=ends)
    else:
        out = torch._scaled_grouped_mm(
            x, columns, x_scale.flatten(), w_scale, offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip
    return finished_groups(out, ends, bias).to(out_dtype)


def finished_groups(
    out: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return a grouped product with the bias of each group, and zeros beyond the last; traceable.

    Args:
        out: `(T, N)`.
        ends: `(E,)` int32, the end of each group.
        bias: `(E, N)`.
    """
    if bias is not None:
        rows = torch.arange(out.shape[0], device=out.device, dtype=torch.int32)
        group = torch.searchsorted(ends, rows, right=True).clamp_max(ends.shape[0] - 1)
        out = out + bias[group].to(out.dtype)
    return zero_tail(out, ends)


def takes(in_features: int, out_features: int, element_bytes: int) -> bool:
    """Return whether torch's grouped product takes weights of such a shape.

    Example:
        >>> takes(16, 24, 2), takes(16, 30, 2)
        (True, False)
    """
    return (in_features | out_features) * element_bytes % STRIDE_BYTES == 0
