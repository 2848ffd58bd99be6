"""Norms and activations whose output is quantized in the pass that makes it."""

from __future__ import annotations

import torch

from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.linear.activation import can_be_remembered, remember_rows
from sage_plugin.kernels.linear.call import LinearCall, LinearRequest
from sage_plugin.kernels.linear.executor import LinearExecutor, host_linear, resolve
from sage_plugin.kernels.linear.rows.prologue import Prologue, prologued
from sage_plugin.kernels.linear.traced import traced_linear
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.surroundings import are_plain, wants_gradient

__all__ = ["fused_linear", "normalized"]

AUTO = LinearRequest()


def fused_linear(
    x: torch.Tensor,
    prologue: Prologue,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply what a prologue makes of `x` with a quantized weight; traceable.

    In eager mode what the prologue makes is neither rounded to 16 bits nor written to memory.

    Args:
        x: `(..., K)`.
        prologue: an activation or a norm.
        weight: the quantized weight.
        bias: `(N,)`.
        out_dtype: dtype of the output, `x`'s if `None`.

    Raises:
        UnsupportedInputError: a prologue that does not fit.

    Example:
        >>> from sage_plugin import quantize_weight
        >>> x, weight = torch.randn(4, 64), quantize_weight(torch.randn(32, 64), "fp8_row")
        >>> fused_linear(x, Prologue("gelu_tanh"), weight).shape
        torch.Size([4, 32])
    """
    prologue.check(x)
    if wants_gradient(x, bias, *prologue.tensors()) or x.numel() == 0:
        made = prologued(x, prologue).to(x.dtype)
        return host_linear(made, weight.dequantized(x.dtype), bias, out_dtype)
    executor = _eager(x, prologue, weight, bias, out_dtype)
    if executor is None:
        return traced_linear(x, weight, bias, out_dtype, prologue)
    return executor.run(LinearCall(x, weight, bias, out_dtype), prologue)


def normalized(x: torch.Tensor, prologue: Prologue, reader: QuantizedWeight) -> torch.Tensor:
    """Return what a norm makes of `x`, in its dtype, and quantize it for the linears that read it.

    The linears that get the output next, with weights of the reader's format, find it quantized:
    `to_q`, `to_k` and `to_v` after a modulated norm cost one pass over `x` in all.

    Args:
        x: `(..., K)`.
        prologue: the norm.
        reader: the weight of one of the linears that read the output.

    Raises:
        UnsupportedInputError: a prologue that does not fit.
    """
    prologue.check(x)
    executor = None
    if x.numel() > 0 and not wants_gradient(x, *prologue.tensors()):
        executor = _eager(x, prologue, reader, None, None)
    if executor is None or not can_be_remembered(x):
        return prologued(x, prologue).to(x.dtype)
    kept = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = executor.rows(LinearCall(x, reader), reader, prologue, kept)
    remember_rows(kept, reader.row_format, reader.smooth, rows)
    return kept


def _eager(
    x: torch.Tensor,
    prologue: Prologue,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> LinearExecutor | None:
    """What runs a call in eager mode, `None` where torch's operations do."""
    if not are_plain(x, bias, *prologue.tensors()):
        return None
    resolved = resolve(LinearCall(x, weight, bias, out_dtype), AUTO)
    return None if isinstance(resolved, FallbackReason) else resolved
