"""A quantized linear for compiled graphs and for torch's modes.

On a GPU rows are quantized by an op, in one pass with the activation or the norm before; elsewhere
all is plain torch operations. FP8 rows are multiplied by torch's product where it is the fastest,
which a compiler sees; others by an op. Nothing here remembers anything: a graph quantizes an input
once for all linears that read it, since the compiler takes equal operations for one.
"""

from __future__ import annotations

import torch

from sage_plugin.kernels.linear.backends import torch_products
from sage_plugin.kernels.linear.backends.emulation import LinearEmulation
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows, quantized_rows
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.linear.torch_ops import multiply_by_op, quantize_by_op
from sage_plugin.kernels.linear.weight import QuantizedWeight

_products, _emulation = torch_products.TorchProducts(), LinearEmulation()


def has_ops(x: torch.Tensor) -> bool:
    """Return whether ops quantize and multiply where a tensor is."""
    return x.is_cuda


def traced_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    prologue: Prologue = NO_PROLOGUE,
    config_dir: str | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, `(..., N)`, from quantized rows.

    Args:
        x: `(..., K)`.
        weight: the quantized weight.
        bias: `(N,)`.
        out_dtype: dtype of the output, `x`'s if `None`.
        prologue: what comes before.
        config_dir: folder of tuned configs that is searched before the others.
    """
    rows = traced_rows(x, weight.row_format, weight.smooth, prologue)
    out = _multiplied(rows, weight, bias, out_dtype or x.dtype, config_dir)
    return out.view(*x.shape[:-1], weight.data.shape[0])


def traced_rows(
    x: torch.Tensor, form: RowFormat, smooth: torch.Tensor | None, prologue: Prologue
) -> QuantizedRows:
    """Return `(M, K)` quantized rows of `x`."""
    if has_ops(x):
        return quantize_by_op(x, form, smooth, prologue)[0]
    return quantized_rows(x, form, smooth, prologue).flat()


def _multiplied(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    config_dir: str | None,
) -> torch.Tensor:
    x = rows.data
    if has_ops(x) and not weight.best_by_torch:
        return multiply_by_op(rows, weight, bias, out_dtype, config_dir)
    scales = x.dtype != torch.int8 and rows.scale.dim() > 0
    if scales and not (x.is_cuda or torch_products.ROW_SCALES_ON_CPU):
        return _emulation.multiply(rows, weight, bias, out_dtype)
    return _products.multiply(rows, weight, bias, out_dtype)
