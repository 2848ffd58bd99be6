"""What follows a product of quantized rows: scales, the cross terms of offsets, bias."""

from __future__ import annotations

import torch

from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight


def finished(
    acc: torch.Tensor,
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the output of a linear from the sums of its 8-bit products.

    The scales are multiplied first: a huge row times a sum could overflow where the output does
    not. With offsets `a` and `b`, `(s q + a)(t w + b)` summed over K channels has four terms.

    Args:
        acc: `(M, N)`, sums of products.
        rows: `(M, K)`.
        weight: `(N, K)`.
        bias: `(N,)`.
        out_dtype: dtype of the output.
    """
    of_rows = rows.scale
    out = acc.float() * (of_rows * weight.scale)
    if rows.offset is not None and weight.offset is not None:
        assert rows.sums is not None
        assert weight.sums is not None
        offset, sums = rows.offset, rows.sums * of_rows
        of_weight = weight.sums * weight.scale + weight.in_features * weight.offset
        out = out + sums * weight.offset + offset * of_weight
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
