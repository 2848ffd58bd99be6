"""The Triton backend of linears."""

from __future__ import annotations

import torch

from sage_plugin.kernels.linear.backends.triton.products import multiply_triton
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.schema import LinearLaunch


class TritonProducts:
    """Multiplies by our own kernel, with one launch config."""

    def __init__(self, launch: LinearLaunch) -> None:
        self.launch = launch

    def multiply(
        self,
        rows: QuantizedRows,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply quantized rows with a weight, `(M, N)`."""
        return multiply_triton(rows, weight, bias, out_dtype, self.launch)
