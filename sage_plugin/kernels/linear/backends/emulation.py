"""The exact emulation of quantized linears, in plain torch."""

from __future__ import annotations

import torch

from sage_plugin.kernels.linear.product import finished
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight


class LinearEmulation:
    """Multiplies rows as device code does: INT8 exactly, FP8 in fp32 sums."""

    def multiply(
        self,
        rows: QuantizedRows,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply quantized rows with a weight, `(M, N)`."""
        exact = torch.float64 if rows.data.dtype == torch.int8 else torch.float32
        acc = rows.data.to(exact) @ weight.data.to(exact).t()
        return finished(acc, rows, weight, bias, out_dtype)
