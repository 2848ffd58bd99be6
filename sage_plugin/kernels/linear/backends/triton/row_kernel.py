"""The Triton kernel that quantizes rows of any length, after a norm or an activation.

Grid: one program a few rows. A row that fits into registers is read once; a longer one twice, tile
by tile. What the prologue computes is never rounded before it is quantized.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.linear.backends.triton.row_arguments import RowPlace
from sage_plugin.kernels.quantize.triton.block_kernels import rotated_channels


@triton.jit
def _tile(x, strides, place, offs_k, live):
    """A tile of rows, (ROWS, BLOCK_K), in fp32; 0 where there is nothing."""
    first = x + place.plane * strides.plane + place.row * strides.row
    at = first[:, None] + offs_k.to(tl.int64)[None, :] * strides.channel
    return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _channels(x, offs_k, K):
    """Numbers of the channels of a tile, (1, BLOCK_K), in fp32."""
    return tl.load(x + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normalized(x, live, K, eps, CENTRED: tl.constexpr):
    """A whole row over its root mean square, without its mean if `CENTRED`; 0 stays 0."""
    if CENTRED:
        x = tl.where(live, x - (tl.sum(x, 1) / K)[:, None], 0.0)
    square = tl.sum(x * x, 1) / K
    return x * (1.0 / tl.sqrt(square + eps))[:, None]


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """Weigh each number by the normal distribution's part that lies under it."""
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _prologued(tensors, strides, place, offs_k, K, eps, CONFIG: tl.constexpr):
    """What is quantized, and which of it there is."""
    live = place.inside[:, None] & (offs_k < K)[None, :]
    x = _tile(tensors.x, strides.x, place, offs_k, live)
    if CONFIG.PROLOGUE == "swiglu":
        gate = _tile(tensors.gate, strides.gate, place, offs_k, live)
        x = x * (gate / (1.0 + tl.exp(-gate)))
    if CONFIG.PROLOGUE == "gelu":
        x = _gelu(x, False)
    if CONFIG.PROLOGUE == "gelu_tanh":
        x = _gelu(x, True)
    if CONFIG.PROLOGUE == "layer_norm":
        x = _normalized(x, live, K, eps, True)
    if CONFIG.PROLOGUE == "rms_norm":
        x = _normalized(x, live, K, eps, False)
    if CONFIG.WEIGHT:
        x = x * _channels(tensors.weight, offs_k, K)
    if CONFIG.BIAS:
        x = x + _channels(tensors.bias, offs_k, K)
    if CONFIG.SCALE:
        x = x * (1.0 + _tile(tensors.scale, strides.scale, place, offs_k, live))
    if CONFIG.SHIFT:
        x = x + _tile(tensors.shift, strides.shift, place, offs_k, live)
    return x, live


@triton.jit
def _balanced(x, smooth, offs_k, K, CONFIG: tl.constexpr):
    """Rows with smoothed and rotated channels."""
    if CONFIG.SMOOTH:
        x = x / tl.load(smooth + offs_k, mask=offs_k < K, other=1.0)[None, :]
    if CONFIG.TURNS > 0:
        x = rotated_channels(x, CONFIG.ROWS, CONFIG.BLOCK_K, CONFIG.TURNS)
    return x


@triton.jit
def _extremes(x, live, CONFIG: tl.constexpr):
    """Highest and lowest number of each row, both infinite for a row that is not finite.

    Of symmetric rows the largest magnitude, as the bits of an fp32 number, NaN above them all.
    """
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1)
    if CONFIG.ASYMMETRIC:
        finite = bits.to(tl.float32, bitcast=True) < float("inf")
        high = tl.max(tl.where(live, x, float("-inf")), 1)
        low = tl.min(tl.where(live, x, float("inf")), 1)
        high, low = tl.where(finite, high, float("inf")), tl.where(finite, low, float("-inf"))
    else:
        high, low = bits, bits
    return high, low


@triton.jit
def _scales(high, low, largest, CONFIG: tl.constexpr):
    """Offset, reach and whether it is finite, of each row from its extremes."""
    if CONFIG.ASYMMETRIC:
        half = high * 0.5 - low * 0.5
        offset, reach, finite = high * 0.5 + low * 0.5, half, half < float("inf")
    else:
        reach = high.to(tl.float32, bitcast=True)
        finite = reach < float("inf")
        if CONFIG.STAGE == 2:
            reach = reach * 0.0 + tl.load(largest).to(tl.float32, bitcast=True)
        reach = tl.where(finite, reach, 1.0)
        offset = reach * 0.0
    return offset, tl.maximum(reach, CONFIG.TINY), finite


@triton.jit
def _values(x, live, offset, reach, finite, data, CONFIG: tl.constexpr):
    """Numbers of 8 bits; 0 for rows that are not finite, NaN where they have no scale to say so."""
    if CONFIG.ASYMMETRIC:
        x = tl.where(live, x - offset[:, None], 0.0)
    y = x * (CONFIG.QMAX / reach)[:, None]
    y = tl.where(finite[:, None], y, float("nan") if CONFIG.STAGE == 2 else 0.0)
    if CONFIG.INT8:
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        # The last byte of an fp32 number just over 1.5 * 2^23 is what was added, rounded.
        return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return y.to(data.dtype.element_ty)


@triton.jit
def quantize_rows_kernel(
    tensors, strides, rows_of_plane, M, K, PADDED, eps, CONFIG: tl.constexpr
):  # fmt: skip
    """Quantize `ROWS` rows; see `rows.quantized_rows` and `prologue.prologued` for the numbers."""
    ROWS: tl.constexpr = CONFIG.ROWS
    BLOCK_K: tl.constexpr = CONFIG.BLOCK_K
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = offs_m < M
    m64 = offs_m.to(tl.int64)
    place = RowPlace(m64 // rows_of_plane, m64 % rows_of_plane, inside)
    offs_k = tl.arange(0, BLOCK_K)
    data = tensors.data
    to = data + m64[:, None] * K
    # largest numbers of each row
    x, live = _prologued(tensors, strides, place, offs_k, K, eps, CONFIG)
    if CONFIG.KEEP:
        kept = tensors.kept
        tl.store(kept + m64[:, None] * K + offs_k[None, :], x.to(kept.dtype.element_ty), mask=live)
    x = _balanced(x, tensors.smooth, offs_k, K, CONFIG)
    high, low = _extremes(x, live, CONFIG)
    if CONFIG.CHUNKED:
        for k in range(BLOCK_K, K, BLOCK_K):
            y, there = _prologued(tensors, strides, place, k + offs_k, K, eps, CONFIG)
            y = _balanced(y, tensors.smooth, k + offs_k, K, CONFIG)
            more, less = _extremes(y, there, CONFIG)
            high, low = tl.maximum(high, more), tl.minimum(low, less)
    if CONFIG.STAGE == 1:
        magnitude = high.to(tl.float32, bitcast=True)
        bits = tl.where(magnitude < float("inf"), high, 0)
        tl.atomic_max(tensors.largest, tl.max(bits, 0), sem="relaxed")
        return
    offset, reach, finite = _scales(high, low, tensors.largest, CONFIG)
    # values of 8 bits: (ROWS, BLOCK_K)
    q = _values(x, live, offset, reach, finite, data, CONFIG)
    tl.store(to + offs_k[None, :], q, mask=live)
    if CONFIG.ASYMMETRIC:
        sums = tl.sum(q.to(tl.int32), 1)
    if CONFIG.CHUNKED:
        for k in range(BLOCK_K, K, BLOCK_K):
            y, there = _prologued(tensors, strides, place, k + offs_k, K, eps, CONFIG)
            y = _balanced(y, tensors.smooth, k + offs_k, K, CONFIG)
            q = _values(y, there, offset, reach, finite, data, CONFIG)
            tl.store(to + k + offs_k[None, :], q, mask=there)
            if CONFIG.ASYMMETRIC:
                sums += tl.sum(q.to(tl.int32), 1)
    # numbers of each row: (ROWS)
    numbers = tensors.numbers
    if CONFIG.STAGE == 0:
        scale = tl.where(finite, reach / CONFIG.QMAX, float("nan"))
        tl.store(numbers + m64, scale, mask=inside)
    else:
        whole = tl.maximum(tl.load(tensors.largest).to(tl.float32, bitcast=True), CONFIG.TINY)
        tl.store(numbers, whole / CONFIG.QMAX)
    if CONFIG.ASYMMETRIC:
        tl.store(numbers + PADDED + m64, offset, mask=inside)
        tl.store(numbers + 2 * PADDED + m64, sums.to(tl.float32), mask=inside)
