"""Quantization of rows in plain torch: the emulation, the traced form, and that of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue, prologued
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.quantize.emulation import round_to
from sage_plugin.kernels.quantize.hadamard import hadamard_matrix, rotated
from sage_plugin.kernels.quantize.recipe import TINY

make_matrix = hadamard_matrix.__wrapped__


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows in 8 bits: `scale * data`, plus `offset` where there is one.

    Attributes:
        data: `(..., K)`.
        scale: `(..., 1)` fp32, or a scalar for all rows; NaN for a row that has NaN or infinity,
            whose data mean nothing.
        offset: `(..., 1)` fp32 of asymmetric rows, the middle of each; else `None`.
        sums: `(..., 1)` fp32 of asymmetric rows, the sum of each row of `data`; else `None`.
    """

    data: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    sums: torch.Tensor | None = None

    def copied(self, places: torch.Tensor) -> QuantizedRows:
        """Return copies of `(M, K)` rows with a scale each, `(M * C, K)`; traceable.

        Args:
            places: `(M, C)` places that each row goes to, none of them twice.
        """
        order = torch.empty_like(places.view(-1), dtype=torch.int64)
        count = torch.arange(order.shape[0], device=order.device)
        order[places.reshape(-1).long()] = count // places.shape[1]
        data = self.data.view(torch.int8).index_select(0, order).view(self.data.dtype)
        return QuantizedRows(data, self.scale.index_select(0, order))

    def flat(self) -> QuantizedRows:
        """Return the same as `(M, K)` with `(M, 1)` numbers."""
        if self.data.dim() == 2:
            return self
        data = self.data[None] if self.data.dim() == 1 else self.data.flatten(0, -2)
        scale = self.scale if self.scale.dim() == 0 else self.scale.reshape(-1, 1)
        if self.offset is None or self.sums is None:
            return QuantizedRows(data, scale)
        return QuantizedRows(data, scale, self.offset.reshape(-1, 1), self.sums.reshape(-1, 1))


def quantized_rows(
    x: torch.Tensor,
    form: RowFormat,
    smooth: torch.Tensor | None = None,
    prologue: Prologue = NO_PROLOGUE,
    kept: torch.Tensor | None = None,
) -> QuantizedRows:
    """Quantize rows; what a compiler traces and fuses into the producer of `x`.

    A row of zeros gives zeros. A row that is not finite has the scale NaN, or with one scale for
    all rows NaN values, and no other row is touched.

    Sources: SmoothQuant (arXiv 2211.10438) equation 3 for `smooth`; QuaRot (arXiv 2404.00456) for
    the rotation.

    Args:
        x: `(..., K)`, any floating type.
        form: the format.
        smooth: `(K,)` fp32 that channels are divided by, `None` for none.
        prologue: what comes before.
        kept: `(..., K)` where the rows go before they are smoothed and quantized.
    """
    y = prologued(x, prologue)
    if kept is not None:
        kept.copy_(y)
    if smooth is not None:
        y = y / smooth
    y = _turned(y, form.rotation)
    if form.asymmetric:
        return _asymmetric(y, form)
    amax = y.abs().amax(-1, keepdim=True)
    finite = amax < math.inf  # false for NaN
    if not form.per_tensor:
        amax = amax.clamp_min(TINY)
        scale = torch.where(finite, amax / form.limit, math.nan)
        return QuantizedRows(round_to(y * (form.limit / amax), form.dtype), scale)
    largest = torch.where(finite, amax, 0.0).amax().clamp_min(TINY)
    values = round_to(y * (form.limit / largest), form.dtype)
    poisoned = torch.full_like(values, math.nan, dtype=torch.float32).to(form.dtype)
    return QuantizedRows(torch.where(finite, values, poisoned), largest / form.limit)


def _turned(y: torch.Tensor, block: int) -> torch.Tensor:
    """Rotate channels; a compiler passes over the memo of the matrix, and warns of it."""
    if not block or not torch.compiler.is_compiling():
        return rotated(y, block)
    matrix = make_matrix(block).to(y.device, y.dtype)
    return (y.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


def _asymmetric(y: torch.Tensor, form: RowFormat) -> QuantizedRows:
    """Quantize the distance from the middle of each row's range.

    By halves of its ends, as the whole may be past the largest number.
    """
    high, low = (end * 0.5 for end in (y.amax(-1, keepdim=True), y.amin(-1, keepdim=True)))
    offset, reach = high + low, (high - low).clamp_min(TINY)
    finite = (high - low) < math.inf  # false for NaN
    values = round_to((y - offset) * (form.limit / reach), form.dtype)
    scale = torch.where(finite, reach / form.limit, math.nan)
    return QuantizedRows(values, scale, offset, values.float().sum(-1, keepdim=True))
