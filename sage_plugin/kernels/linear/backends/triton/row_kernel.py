"""The Triton kernel that quantizes rows of any length, after a norm or an activation.

Grid: one program a few rows. A row that fits into registers is read once, as one tile or as two
whose channels are powers of two and fill what K needs; a longer one twice, tile by tile. What the
prologue computes is never rounded before it is quantized.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.linear.backends.triton.row_arguments import RowPlace
from sage_plugin.kernels.quantize.triton.block_kernels import rotated_channels

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(x, strides, place, offs_k, live, CONFIG: tl.constexpr):
    """A tile of rows, (ROWS, BLOCK_K), in fp32; 0 where there is nothing."""
    first = x + place.plane * strides.plane + place.row * strides.row
    at = first[:, None] + offs_k.to(tl.int64)[None, :] * strides.channel
    if CONFIG.CHUNKED:
        tile = tl.load(at, mask=live, other=0.0)
    else:  # what multiplies the rows needs the cache more
        tile = tl.load(at, mask=live, other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)


@triton.jit
def _channels(x, offs_k, K):
    """Numbers of the channels of a tile, (1, BLOCK_K), in fp32."""
    return tl.load(x + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """Weigh each number by the normal distribution's part that lies under it."""
    if TANH:  # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))
        SLOPE: tl.constexpr = -2.0 * 0.7978845608028654 * LOG2E
        CURVE: tl.constexpr = SLOPE * 0.044715
        return x / (1.0 + tl.exp2(x * (SLOPE + CURVE * (x * x))))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _activated(tensors, strides, place, offs_k, K, CONFIG: tl.constexpr):
    """A tile of what activations make of the input, and which of it there is."""
    live = place.inside[:, None] & (offs_k < K)[None, :]
    x = _tile(tensors.x, strides.x, place, offs_k, live, CONFIG)
    if CONFIG.PROLOGUE == "swiglu":
        gate = _tile(tensors.gate, strides.gate, place, offs_k, live, CONFIG)
        x = x * (gate / (1.0 + tl.exp2(-LOG2E * gate)))
    if CONFIG.PROLOGUE == "gelu":
        x = _gelu(x, False)
    if CONFIG.PROLOGUE == "gelu_tanh":
        x = _gelu(x, True)
    return x, live


@triton.jit
def _modulated(x, tensors, strides, place, offs_k, live, K, CONFIG: tl.constexpr):
    """A tile of a norm with its weights and modulation, stored if it is kept."""
    if CONFIG.WEIGHT:
        x = x * _channels(tensors.weight, offs_k, K)
    if CONFIG.BIAS:
        x = x + _channels(tensors.bias, offs_k, K)
    if CONFIG.FACTOR:
        x = x * _tile(tensors.factor, strides.factor, place, offs_k, live, CONFIG)
    if CONFIG.SHIFT:
        x = x + _tile(tensors.shift, strides.shift, place, offs_k, live, CONFIG)
    if CONFIG.KEEP:
        kept = tensors.kept
        at = kept + place.m64[:, None] * K + offs_k[None, :]
        tl.store(at, x.to(kept.dtype.element_ty), mask=live)
    return x


@triton.jit
def _balanced(x, smooth, offs_k, K, BLOCK: tl.constexpr, CONFIG: tl.constexpr):
    """A tile with smoothed and rotated channels."""
    if CONFIG.SMOOTH:
        x = x / tl.load(smooth + offs_k, mask=offs_k < K, other=1.0)[None, :]
    if CONFIG.TURNS > 0:
        x = rotated_channels(x, CONFIG.ROWS, BLOCK, CONFIG.TURNS)
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
        if CONFIG.STAGE == 2:  # NaN for rows that are not finite: they have no scale to say so
            reach = reach * 0.0 + tl.load(largest).to(tl.float32, bitcast=True)
        offset = reach * 0.0
    return offset, tl.where(reach < CONFIG.TINY, CONFIG.TINY, reach), finite


@triton.jit
def _copied(copies, place, copy, CONFIG: tl.constexpr):
    """Where one of the copies of each row goes: (ROWS)."""
    row = tl.load(copies + place.m64 * CONFIG.COPIES + copy, mask=place.inside, other=0)
    return row.to(tl.int64)


@triton.jit
def _store_values(x, live, place, offs_k, offset, reach, tensors, K, CONFIG: tl.constexpr):
    """Store a tile in 8 bits, and return the sums of its rows; any where a row is not finite."""
    data = tensors.data
    if CONFIG.ASYMMETRIC:
        x = tl.where(live, x - offset[:, None], 0.0)
    y = x * (CONFIG.QMAX / reach)[:, None]
    if CONFIG.INT8:
        if CONFIG.ASYMMETRIC:  # the offset is rounded
            y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        # The last byte of an fp32 number just over 1.5 * 2^23 is what was added, rounded.
        q = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        q = y.to(data.dtype.element_ty)
    COPIES: tl.constexpr = CONFIG.COPIES
    if COPIES > 0:
        for copy in tl.static_range(COPIES):
            row = _copied(tensors.copies, place, copy, CONFIG)
            tl.store(data + row[:, None] * K + offs_k[None, :], q, mask=live)
    else:
        tl.store(data + place.m64[:, None] * K + offs_k[None, :], q, mask=live)
    sums = offset
    if CONFIG.ASYMMETRIC:
        sums = tl.sum(q.to(tl.int32), 1).to(tl.float32)
    return sums


@triton.jit
def quantize_rows_kernel(tensors, strides, rows_of_plane, M, K, PADDED, eps, CONFIG: tl.constexpr):
    """Quantize `ROWS` rows; see `rows.quantized` and `rows.prologue` for the numbers."""
    ROWS: tl.constexpr = CONFIG.ROWS
    BLOCK_K: tl.constexpr = CONFIG.BLOCK_K
    REST: tl.constexpr = CONFIG.REST
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = offs_m < M
    m64 = offs_m.to(tl.int64)
    place = RowPlace(m64 // rows_of_plane, m64 % rows_of_plane, m64, inside)
    smooth = tensors.smooth
    # one tile or two of each row: (ROWS, BLOCK_K) and (ROWS, REST)
    offs_k = tl.arange(0, BLOCK_K)
    x, live = _activated(tensors, strides, place, offs_k, K, CONFIG)
    if REST > 0:
        offs_r = BLOCK_K + tl.arange(0, REST)
        rest, there = _activated(tensors, strides, place, offs_r, K, CONFIG)
    # norm
    if CONFIG.PROLOGUE == "layer_norm":
        total = tl.sum(x, 1)
        if REST > 0:
            total += tl.sum(rest, 1)
        mean = (total / K)[:, None]
        x = tl.where(live, x - mean, 0.0)
        if REST > 0:
            rest = tl.where(there, rest - mean, 0.0)
    if CONFIG.PROLOGUE == "layer_norm" or CONFIG.PROLOGUE == "rms_norm":
        square = tl.sum(x * x, 1)
        if REST > 0:
            square += tl.sum(rest * rest, 1)
        factor = (1.0 / tl.sqrt(square / K + eps))[:, None]
        x *= factor
        if REST > 0:
            rest *= factor
    x = _modulated(x, tensors, strides, place, offs_k, live, K, CONFIG)
    x = _balanced(x, smooth, offs_k, K, BLOCK_K, CONFIG)
    # extremes of each row: (ROWS)
    high, low = _extremes(x, live, CONFIG)
    if REST > 0:
        rest = _modulated(rest, tensors, strides, place, offs_r, there, K, CONFIG)
        rest = _balanced(rest, smooth, offs_r, K, REST, CONFIG)
        more, less = _extremes(rest, there, CONFIG)
        high, low = tl.maximum(high, more), tl.minimum(low, less)
    if CONFIG.CHUNKED:
        for k in range(BLOCK_K, K, BLOCK_K):
            y, lives = _activated(tensors, strides, place, k + offs_k, K, CONFIG)
            y = _balanced(y, smooth, k + offs_k, K, BLOCK_K, CONFIG)
            more, less = _extremes(y, lives, CONFIG)
            high, low = tl.maximum(high, more), tl.minimum(low, less)
    if CONFIG.STAGE == 1:
        magnitude = high.to(tl.float32, bitcast=True)
        bits = tl.where(magnitude < float("inf"), high, 0)
        tl.atomic_max(tensors.largest, tl.max(bits, 0), sem="relaxed")
        return
    # values of 8 bits
    offset, reach, finite = _scales(high, low, tensors.largest, CONFIG)
    sums = _store_values(x, live, place, offs_k, offset, reach, tensors, K, CONFIG)
    if REST > 0:
        sums += _store_values(rest, there, place, offs_r, offset, reach, tensors, K, CONFIG)
    if CONFIG.CHUNKED:
        for k in range(BLOCK_K, K, BLOCK_K):
            y, lives = _activated(tensors, strides, place, k + offs_k, K, CONFIG)
            y = _balanced(y, smooth, k + offs_k, K, BLOCK_K, CONFIG)
            sums += _store_values(y, lives, place, k + offs_k, offset, reach, tensors, K, CONFIG)
    # numbers of each row: (ROWS)
    numbers = tensors.numbers
    if CONFIG.STAGE == 0:
        scale = tl.where(finite, reach / CONFIG.QMAX, float("nan"))
        COPIES: tl.constexpr = CONFIG.COPIES
        if COPIES > 0:
            for copy in tl.static_range(COPIES):
                row = _copied(tensors.copies, place, copy, CONFIG)
                tl.store(numbers + row, scale, mask=inside)
        else:
            tl.store(numbers + m64, scale, mask=inside)
    else:
        whole = tl.maximum(tl.load(tensors.largest).to(tl.float32, bitcast=True), CONFIG.TINY)
        tl.store(numbers, whole / CONFIG.QMAX)
    if CONFIG.ASYMMETRIC:
        tl.store(numbers + PADDED + m64, offset, mask=inside)
        tl.store(numbers + 2 * PADDED + m64, sums, mask=inside)
