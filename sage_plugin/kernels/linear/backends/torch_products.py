"""Torch's own products of 8-bit matrices: `_scaled_mm` and `_int_mm`; traceable."""

from __future__ import annotations

import torch

from sage_plugin.kernels.linear.product import finished
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight


def _has_row_scales() -> bool:
    """Whether torch's FP8 product on a CPU takes a scale for each row, as that of 2.11 does not."""
    x = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="cpu")
    scale = torch.ones(16, 1, device="cpu")
    try:
        torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):  # which says that it takes no such scales, or no FP8
        return False
    return True


ROW_SCALES_ON_CPU = _has_row_scales()
"""Asked once and at the import, so that compilers see a constant."""

FEWEST_INT8_ROWS = 17
"""What `_int_mm` asks for on a GPU."""


class TorchProducts:
    """Multiplies by torch's own products.

    Attributes:
        asks: whether torch is asked for fp16 outputs of rows with scales, which some of its
            products give and others refuse when they are called; not in a traced graph, where a
            cast is one operation with what reads the output.
    """

    def __init__(self, *, asks: bool = False) -> None:
        self.asks = asks

    def multiply(
        self,
        rows: QuantizedRows,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply quantized rows with a weight, `(M, N)`."""
        if rows.data.dtype == torch.int8:
            return finished(_int8_sums(rows.data, weight.data), rows, weight, bias, out_dtype)
        if out_dtype == torch.float16 and (self.asks or rows.scale.dim() == 0):
            try:
                return _scaled(rows, weight, bias, torch.float16)
            except (RuntimeError, ValueError):
                out = _scaled(rows, weight, bias, torch.bfloat16)  # or the same error again
                self.asks = False
                return out.to(torch.float16)
        # 0.2 % of rounding beside some 2.7 % of loss
        out = _scaled(rows, weight, bias, torch.bfloat16)
        return out if out_dtype == torch.bfloat16 else out.to(out_dtype)


def _int8_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sums of int8 products; few rows are padded to as many as torch asks for."""
    rows = x.shape[0]
    if rows >= FEWEST_INT8_ROWS or not x.is_cuda:
        return torch._int_mm(x, weight.t())
    padded = torch.nn.functional.pad(x, (0, 0, 0, FEWEST_INT8_ROWS - rows))
    return torch._int_mm(padded, weight.t())[:rows]


def _scaled(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Torch's product of FP8 rows, in a dtype of 16 bits."""
    if bias is not None and bias.dtype != out_dtype:
        bias = bias.to(out_dtype)
    columns, scale_b = weight.columns
    return torch._scaled_mm(
        rows.data, columns, rows.scale, scale_b, bias, out_dtype=out_dtype, use_fast_accum=True
    )
