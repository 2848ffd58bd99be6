"""A quantized linear in plain torch operations, for compiled graphs and for torch's modes.

A compiler fuses scale and cast into what made `x`, and the epilogue of an INT8 product into what
reads the output. Nothing here asks a device or remembers anything.
"""

from __future__ import annotations

import torch

from sage_plugin.kernels.linear.backends.torch_products import TorchProducts, takes
from sage_plugin.kernels.linear.product import finished
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.linear.weight import QuantizedWeight

_products = TorchProducts()


def traced_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    prologue: Prologue = NO_PROLOGUE,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, `(..., N)`, from quantized rows.

    Args:
        x: `(..., K)`.
        weight: the quantized weight.
        bias: `(N,)`.
        out_dtype: dtype of the output, `x`'s if `None`.
        prologue: what comes before.
    """
    out_dtype = out_dtype or x.dtype
    rows = quantized_rows(x, weight.row_format, weight.smooth, prologue).flat()
    int8 = rows.data.dtype == torch.int8
    if x.is_cuda and not takes(weight.in_features, weight.out_features, int8=int8):
        out = finished(rows.data.float() @ weight.data.float().t(), rows, weight, bias, out_dtype)
    else:
        out = _products.multiply(rows, weight, bias, out_dtype)
    return out.view(*x.shape[:-1], weight.out_features)
