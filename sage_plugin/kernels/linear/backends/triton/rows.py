"""Launch code of the quantizer of rows: one launch, or two with one scale for all rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.linear.backends.triton.row_arguments import (
    PlaneStrides,
    RowConfig,
    RowStrides,
    RowTensors,
)
from sage_plugin.kernels.linear.backends.triton.row_kernel import quantize_rows_kernel
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, NORMS, Prologue
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.quantize.recipe import TINY
from sage_plugin.kernels.repeats import Repeats, repeats_of

WARP_VALUES = 1024
"""Values that a warp holds of its program's tiles, 32 a thread."""

FEWEST_WARPS, MOST_WARPS = 4, 16
LARGEST_TILE = 32768
"""Channels of a row up to which it is read once: 64 values a thread of 16 warps."""

CHUNK = 8192
"""Channels of a tile of longer rows."""

SMALLEST_TILE = 16


class Tiling(NamedTuple):
    """Rows of a program, channels of its tiles, and its warps."""

    rows: int
    block_k: int
    rest: int
    warps: int


def tiling_of(channels: int, rotation: int = 0) -> Tiling:
    """Return the tiles for rows of so many channels: a power of two, or two that are fewer.

    Example:
        >>> tiling_of(8960)
        Tiling(rows=1, block_k=8192, rest=1024, warps=8)
    """
    smallest = max(SMALLEST_TILE, rotation)
    block, rest = max(smallest, 1 << (channels - 1).bit_length()), 0
    if block > LARGEST_TILE:
        return Tiling(1, CHUNK, 0, CHUNK // WARP_VALUES)
    half = block // 2
    if half < channels and half >= smallest:
        rest = max(smallest, 1 << (channels - half - 1).bit_length())
        block, rest = (half, rest) if rest < half else (block, 0)
    whole = block + rest
    rows = max(1, FEWEST_WARPS * WARP_VALUES // whole)
    rows = 1 << (rows.bit_length() - 1)
    warps = 1 << (max(1, whole // WARP_VALUES).bit_length() - 1)
    return Tiling(rows, block, rest, min(MOST_WARPS, max(FEWEST_WARPS, warps)))


def takes_rows(channels: int, prologue: Prologue = NO_PROLOGUE) -> bool:
    """Return whether the kernel quantizes rows of so many channels; norms need them whole.

    Example:
        >>> takes_rows(40_000), takes_rows(40_000, Prologue("rms_norm"))
        (True, False)
    """
    return channels <= LARGEST_TILE or prologue.kind not in NORMS


_repeats: Memo[Repeats] = Memo(4096)


def quantize_rows_triton(
    x: torch.Tensor,
    form: RowFormat,
    smooth: torch.Tensor | None = None,
    prologue: Prologue = NO_PROLOGUE,
    kept: torch.Tensor | None = None,
    copies: torch.Tensor | None = None,
) -> QuantizedRows:
    """Quantize rows in place of their strides.

    Args:
        x: `(..., K)`.
        form: the format.
        smooth: `(K,)` fp32 that channels are divided by.
        prologue: what comes before.
        kept: `(..., K)` contiguous, where the rows go before they are smoothed and quantized.
        copies: `(M, C)` int32 places in the output that each row goes to, none of them twice; of
            rows with a scale each, and no offset.

    Returns:
        `(M, K)` rows, or `(M * C, K)` copies.
    """
    plain = prologue is NO_PROLOGUE and kept is None and copies is None
    others: tuple[torch.Tensor | None, ...] = (smooth,)
    key: tuple[object, ...] = (form, x.shape, x.stride(), x.dtype, x.device, smooth is None)
    if not plain:
        gate, weight, bias, factor, shift = prologue.tensors()
        # Of one number a channel only those that lie together are read.
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        others = (smooth, gate, weight, bias, factor, shift, kept, copies)
        key += (prologue.kind, prologue.eps, *map(_spec, others))
    if not x.is_cuda:
        return _as_rows(*_quantize(x, form, prologue, *others), form)
    known = repeats_of(_repeats, key)
    made = known.repeat((x, *others), x.device, _quantize, x, form, prologue, *others)
    return _as_rows(*made, form)


def _spec(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def _as_rows(data: torch.Tensor, numbers: torch.Tensor | None, form: RowFormat) -> QuantizedRows:
    """What the kernel wrote, as rows."""
    assert numbers is not None
    if not form.asymmetric:
        return QuantizedRows(data, numbers)
    scale, offset, sums = numbers[:, : data.shape[0], None].unbind()
    return QuantizedRows(data, scale, offset, sums)


def _quantize(
    x: torch.Tensor,
    form: RowFormat,
    prologue: Prologue,
    smooth: torch.Tensor | None,
    gate: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    copies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch; the data, and numbers of each row."""
    channels = x.shape[-1]
    rows = x.numel() // channels
    tile = tiling_of(channels, form.rotation)
    # Whole 16 bytes, so that a launch graph may point to each row of numbers.
    padded = -(-rows // 4) * 4
    made = rows if copies is None else copies.numel()
    data = torch.empty((made, channels), dtype=form.dtype, device=x.device)
    size = (3, padded) if form.asymmetric else () if form.per_tensor else (made, 1)
    numbers = torch.empty(size, dtype=torch.float32, device=x.device)
    largest = launch_graph.zeros(x.device, torch.int32, 1) if form.per_tensor else None
    whole = _in_planes(x, x.shape)
    others = [None if t is None else _in_planes(t, x.shape) for t in (gate, factor, shift)]
    planes = (whole, *others)
    tensors = RowTensors(
        whole, planes[1], weight, bias, planes[2], planes[3], smooth, data, numbers, largest,
        kept, copies,
    )  # fmt: skip
    strides = RowStrides(
        *(PlaneStrides(*(t.stride() if t is not None else (0,) * 3)) for t in planes)
    )
    for stage in (1, 2) if form.per_tensor else (0,):
        config = RowConfig(
            ROWS=tile.rows, BLOCK_K=tile.block_k, REST=tile.rest,
            CHUNKED=channels > tile.block_k + tile.rest,
            PROLOGUE=prologue.kind, WEIGHT=weight is not None, BIAS=bias is not None,
            FACTOR=factor is not None, SHIFT=shift is not None,
            KEEP=kept is not None and stage != 1, SMOOTH=smooth is not None,
            TURNS=max(form.rotation, 1).bit_length() - 1, INT8=form.dtype == torch.int8,
            QMAX=form.limit, TINY=TINY, ASYMMETRIC=form.asymmetric, STAGE=stage,
            COPIES=0 if copies is None else copies.shape[1],
        )  # fmt: skip
        launch_graph.launch(
            quantize_rows_kernel, -(-rows // tile.rows),
            tensors, strides, whole.shape[1], rows, channels, padded, prologue.eps,
            CONFIG=config, num_warps=tile.warps, enable_fp_fusion=True,
        )  # fmt: skip
    return data, numbers


def _in_planes(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A view of rows of a shape as planes of rows; a copy where strides leave no other way."""
    whole = tensor.expand(shape)
    if whole.dim() < 3:
        return whole.reshape(1, -1, shape[-1])
    return whole if whole.dim() == 3 else whole.reshape(-1, *shape[-2:])
