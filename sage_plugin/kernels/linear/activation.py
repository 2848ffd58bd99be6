"""Activations that several linears read are quantized once.

`to_q`, `to_k` and `to_v` get the same tensor one after another. Each thread remembers the last few
that it quantized, by the tensor itself, its version, shape and strides. Nothing is kept alive: what
was made of a tensor goes when the tensor goes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from sage_plugin.kernels.linear.quantizer import quantizer_of
from sage_plugin.kernels.linear.rows.prologue import Prologue, prologued
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.surroundings import on_device, without_autocast

# Without the objects that torch's own functions make of the same.
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)

MOST_REMEMBERED = 2
"""Activations a thread: joint blocks alternate between the streams of image and text."""

Quantizer = Callable[[torch.Tensor, RowFormat, "torch.Tensor | None"], QuantizedRows]


class _Entry:
    """Quantized rows of a tensor for as long as it lives and is not written."""

    __slots__ = ("_of", "_smooth", "_spec", "rows")

    def __init__(
        self,
        x: torch.Tensor,
        smooth: torch.Tensor | None,
        spec: tuple[object, ...],
        rows: QuantizedRows,
    ) -> None:
        self.rows: QuantizedRows | None = rows
        self._of = weakref.ref(x, self._drop)
        self._smooth, self._spec = smooth, spec

    def _drop(self, _: object) -> None:
        self.rows = None

    def found(
        self, x: torch.Tensor, smooth: torch.Tensor | None, spec: tuple[object, ...]
    ) -> QuantizedRows | None:
        """The rows, if they are those of `x` as it is now."""
        if self._of() is x and self._smooth is smooth and self._spec == spec:
            return self.rows
        return None


class _Remembered(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_remembered = _Remembered()


def quantize_rows(
    x: torch.Tensor, form: RowFormat, smooth: torch.Tensor | None, quantizer: Quantizer
) -> QuantizedRows:
    """Quantize the rows of an activation, or return what was made of it for the linear before.

    Args:
        x: `(..., K)`.
        form: the format.
        smooth: what channels are divided by.
        quantizer: what quantizes it to `(M, K)` rows.
    """
    spec = _spec(x, form)
    if spec is None:
        return quantizer(x, form, smooth)
    entries = _remembered.entries
    for entry in entries:
        rows = entry.found(x, smooth, spec)
        if rows is not None:
            return rows
    rows = quantizer(x, form, smooth)
    _remember(x, smooth, spec, rows)
    return rows


def remember_rows(
    x: torch.Tensor, form: RowFormat, smooth: torch.Tensor | None, rows: QuantizedRows
) -> None:
    """Let the next linears that read an activation have rows that were made along with it."""
    spec = _spec(x, form)
    if spec is not None:
        _remember(x, smooth, spec, rows)


def quantize_norm(
    x: torch.Tensor, norm: Prologue, reader: QuantizedWeight, dtype: torch.dtype
) -> torch.Tensor:
    """Return what a norm makes of `x`, and remember its rows for linears of a weight's format.

    Args:
        x: `(..., K)`, what is made of which can be remembered.
        norm: the norm, with what it is modulated by.
        reader: an 8-bit weight.
        dtype: dtype of the output.
    """
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return prologued(x, norm).to(dtype)
    kept = torch.empty(x.shape, dtype=dtype, device=x.device)
    with on_device(x.device), without_autocast(x.device):
        rows = quantizer_of(x.device)(x, reader.row_format, reader.smooth, norm, kept)
    remember_rows(kept, reader.row_format, reader.smooth, rows)
    return kept


def _remember(
    x: torch.Tensor, smooth: torch.Tensor | None, spec: tuple[object, ...], rows: QuantizedRows
) -> None:
    entries = _remembered.entries
    entries[:] = [one for one in entries if one.rows is not None][1 - MOST_REMEMBERED :]
    entries.append(_Entry(x, smooth, spec, rows))


def can_be_remembered(x: torch.Tensor) -> bool:
    """Return whether what is made of a tensor like this one would be remembered.

    Writes to tensors of inference mode do not show. What is captured for a CUDA graph is filled
    when the graph is replayed, and rows from before the capture would be stale then.
    """
    return not x.is_inference() and not (x.is_cuda and _is_capturing())


def forget_rows() -> None:
    """Drop what this thread remembers."""
    _remembered.entries.clear()


def _spec(x: torch.Tensor, form: RowFormat) -> tuple[object, ...] | None:
    """All that rows follow from beside the tensor; those of another stream may not be there yet."""
    if not can_be_remembered(x):
        return None
    stream = _stream_of(x.get_device()) if x.is_cuda else 0
    return (x._version, x.shape, x.stride(), x.storage_offset(), form, stream)
