"""The exact emulation of grouped linears, in plain torch; it reads the group sizes."""

from __future__ import annotations

import torch

from sage_plugin.kernels.grouped_linear.operands import GroupedOperands, ends_of


def multiply_groups_emulated(operands: GroupedOperands, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply group by group as device code does: INT8 exactly, others in fp32 sums; `(T, N)`."""
    x, x_scale, weights, w_scale, group_sizes, bias = operands
    sums = torch.float64 if x.dtype == torch.int8 else torch.float32
    out = torch.zeros(x.shape[0], weights.shape[1], dtype=out_dtype, device=x.device)
    begin = 0
    for group, end in enumerate(ends_of(group_sizes, x.shape[0]).tolist()):
        if end > begin:
            own = slice(begin, end)
            acc = (x[own].to(sums) @ weights[group].to(sums).t()).float()
            if x_scale is not None and w_scale is not None:
                acc = acc * (x_scale[own] * w_scale[group])
            if bias is not None:
                acc = acc + bias[group].float()
            out[own] = acc.to(out_dtype)
        begin = end
    return out
