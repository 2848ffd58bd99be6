"""The Triton kernel of the prologue: norm and rotary embedding of tokens of Q, and of K with them.

Where attention quantizes Q, its rows are quantized here, and Q is never written in 16 bits.
A program has a block of tokens and heads. Channels lie in two tensors, the first of each pair and
the second: halves of a head are loaded apart, neighbors are parted in registers. A table is read
once for all heads of the block, and for Q and K together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.quantize.triton.block_kernels import granule_values


@triton.jit
def _load_pairs(at, live, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """First and second channels of the pairs of rows: two of (..., BLOCK), as they are stored."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.load(at + both, mask=live & (both < 2 * HALF), other=0.0)
        first, second = tl.split(x.reshape([x.shape[0], x.shape[1], BLOCK, 2]))
    else:
        d = tl.arange(0, BLOCK)[None, None, :]
        first = tl.load(at + d, mask=live & (d < HALF), other=0.0)
        second = tl.load(at + HALF + d, mask=live & (d < HALF), other=0.0)
    return first, second


@triton.jit
def _store_pairs(
    at, first, second, live, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Write channels back in their order."""
    kind = at.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.join(first, second).reshape([first.shape[0], first.shape[1], 2 * BLOCK])
        tl.store(at + both, x.to(kind), mask=live & (both < 2 * HALF))
    else:
        d = tl.arange(0, BLOCK)[None, None, :]
        tl.store(at + d, first.to(kind), mask=live & (d < HALF))
        tl.store(at + HALF + d, second.to(kind), mask=live & (d < HALF))


@triton.jit
def _sum(first, second, ACROSS: tl.constexpr):
    """Sums over the channels of each head, or of all: (tokens, heads or 1, 1)."""
    total = tl.sum(first + second, 2)
    if ACROSS:
        total = tl.sum(total, 1)[:, None]
    return total[:, :, None]


@triton.jit
def _normalized(
    first, second, values, channels, there, live, divisor, eps,
    LAYER: tl.constexpr, ACROSS: tl.constexpr, ROUNDS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The norm of channels, rounded as often as the chain of torch rounds."""
    if LAYER:
        mean = _sum(first, second, ACROSS) / divisor
        first = tl.where(live, first - mean, 0.0)
        second = tl.where(live, second - mean, 0.0)
    square = _sum(first * first, second * second, ACROSS) / divisor
    factor = tl.rsqrt(square + eps)
    first, second = first * factor, second * factor
    if ROUNDS:
        first, second = first.to(KIND).to(tl.float32), second.to(KIND).to(tl.float32)
    if values.weight is not None:
        one, other = _load_pairs(values.weight + channels, there, INTERLEAVED, HALF, BLOCK)
        first, second = first * one.to(tl.float32), second * other.to(tl.float32)
    if values.bias is not None:
        if ROUNDS:
            first, second = first.to(KIND).to(tl.float32), second.to(KIND).to(tl.float32)
        one, other = _load_pairs(values.bias + channels, there, INTERLEAVED, HALF, BLOCK)
        first, second = first + one.to(tl.float32), second + other.to(tl.float32)
    return first.to(KIND).to(tl.float32), second.to(KIND).to(tl.float32)


@triton.jit
def _of_pairs(table, strides, at, turned, other, TWIN: tl.constexpr):
    """A table's values of both channels of each pair."""
    first = tl.load(table + at, mask=turned, other=other).to(tl.float32)
    if TWIN:
        return first, first
    second = tl.load(table + at + strides.second, mask=turned, other=other)
    return first, second.to(tl.float32)


@triton.jit
def _store_quantized(
    to, first, second, b, s, h, tokens, heads, INTERLEAVED: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, QMAX: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Quantize rows as `quantize_queries` does, each with a scale of its own, and write them.

    Tokens and channels past the true ones become zeros; such channels lie behind both halves.
    """
    KIND: tl.constexpr = to.numbers.dtype.element_ty
    first, second = first * to.multiplier, second * to.multiplier  # (tokens, heads, BLOCK)
    one, other = tl.abs(first).to(tl.int32, bitcast=True), tl.abs(second).to(tl.int32, bitcast=True)
    magnitude = tl.max(tl.maximum(one, other), 2)[:, :, None].to(tl.float32, bitcast=True)
    magnitude = tl.where(s < tokens, magnitude, 0.0)  # (tokens, heads, 1)
    finite = magnitude < float("inf")
    amax = tl.maximum(tl.where(finite, magnitude, float("inf")), TINY)
    kept = finite & (s < tokens)
    first, second = tl.where(kept, first, 0.0), tl.where(kept, second, 0.0)
    rows = (s < to.tokens) & (h < heads)
    strides = to.scale_strides
    at = b * strides.batch + s.to(tl.int64) * strides.token + h.to(tl.int64) * strides.head
    tl.store(to.scale + at, amax / QMAX, mask=rows)
    strides = to.number_strides
    at = b * strides.batch + s.to(tl.int64) * strides.token + h.to(tl.int64) * strides.head
    if INTERLEAVED:
        d = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.join(first, second).reshape([first.shape[0], first.shape[1], 2 * BLOCK])
        y = _with_zeros(granule_values(x, amax, KIND, QMAX), d, 2 * HALF, 2 * BLOCK)
        tl.store(to.numbers + at + d, y, mask=rows)
    else:
        d = tl.arange(0, BLOCK)[None, None, :]
        one = _with_zeros(granule_values(first, amax, KIND, QMAX), d, HALF, BLOCK)
        other = _with_zeros(granule_values(second, amax, KIND, QMAX), d, HALF, BLOCK)
        if HALF == BLOCK:
            first_at, second_at = d, HALF + d
        else:
            first_at, second_at = (
                d + tl.where(d < HALF, 0, HALF),
                d + tl.where(d < HALF, HALF, BLOCK),
            )
        tl.store(to.numbers + at + first_at, one, mask=rows)
        tl.store(to.numbers + at + second_at, other, mask=rows)


@triton.jit
def _with_zeros(x, d, LIVE: tl.constexpr, ALL: tl.constexpr):
    """Quantized channels with zeros past the true ones, whatever ptxas makes of zeros in FP8."""
    if LIVE == ALL:
        return x
    return tl.where(d < LIVE, x.to(tl.int8, bitcast=True), 0).to(x.dtype, bitcast=True)


@triton.jit
def prologue_kernel(
    sources, outputs, quantized, values, turned, source_strides, output_strides, tokens, heads, eps,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """A block of tokens and heads of Q, or of Q and K.

    Sources are `(B, S, H, D)`, one or two with the same strides, and so are outputs. Where
    `quantized` is given, the first source goes there and the others have outputs; `turned` is
    `None` without a rotary embedding.
    """
    INTERLEAVED: tl.constexpr = CONFIG.INTERLEAVED
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK: tl.constexpr = CONFIG.BLOCK_D // 2
    BLOCK_S: tl.constexpr = CONFIG.BLOCK_S
    BLOCK_H: tl.constexpr = CONFIG.BLOCK_H
    KIND: tl.constexpr = sources[0].dtype.element_ty
    PLAIN: tl.constexpr = 0 if quantized is None else 1  # the first source with an output
    written = tokens
    if quantized is not None:
        written = quantized.tokens
    token_blocks, head_blocks = tl.cdiv(written, BLOCK_S), tl.cdiv(heads, BLOCK_H)
    pid = tl.program_id(0)
    b = (pid // head_blocks // token_blocks).to(tl.int64)
    s = pid // head_blocks % token_blocks * BLOCK_S + tl.arange(0, BLOCK_S)[:, None, None]
    h = pid % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)[None, :, None]
    d = tl.arange(0, BLOCK)[None, None, :]
    rows = (s < tokens) & (h < heads)
    live = rows & (d < HALF)
    at = b * source_strides.batch + s.to(tl.int64) * source_strides.token
    at += h.to(tl.int64) * source_strides.head
    # All that is far away is under way before anything is computed.
    first, second = _load_pairs(sources[0] + at, rows, INTERLEAVED, HALF, BLOCK)
    if len(sources) == 2:
        next_first, next_second = _load_pairs(sources[1] + at, rows, INTERLEAVED, HALF, BLOCK)
    if turned is not None:
        here = (s >= turned.begin) & (s < turned.end)  # (tokens, 1, 1)
        row, head = (s - turned.begin).to(tl.int64), h
        if CONFIG.BY_HEAD:
            seen = here & live
        else:
            seen, head = here & (d < HALF), 0
        to = turned.cos_strides
        place = b * to.batch + row * to.token + head * to.head + d * to.pair
        cos, other_cos = _of_pairs(turned.cos, to, place, seen, 1.0, CONFIG.TWIN)
        to = turned.sin_strides
        place = b * to.batch + row * to.token + head * to.head + d * to.pair
        sin, other_sin = _of_pairs(turned.sin, to, place, seen, 0.0, CONFIG.TWIN)
    if CONFIG.ACROSS:
        channels, there, divisor = h * HEAD_DIM, h < heads, heads * HEAD_DIM
    else:  # of one head
        channels, there = tl.zeros([1, 1, 1], tl.int32), tl.full([1, 1, 1], True, tl.int1)
        divisor = HEAD_DIM
    for i in tl.static_range(len(sources)):
        if i == 1:
            first, second = next_first, next_second
        one, other = first.to(tl.float32), second.to(tl.float32)
        if CONFIG.NORM > 0:
            one, other = _normalized(
                one, other, values[i], channels, there, live, divisor, eps, CONFIG.NORM == 1,
                CONFIG.ACROSS, CONFIG.ROUNDS, INTERLEAVED, HALF, BLOCK, KIND,
            )  # fmt: skip
        if turned is not None:
            turned_one, turned_other = one * cos - other * sin, other * other_cos + one * other_sin
            one, other = tl.where(here, turned_one, one), tl.where(here, turned_other, other)
        if i < PLAIN:  # rounded as the other's output is
            one, other = one.to(KIND).to(tl.float32), other.to(KIND).to(tl.float32)
            _store_quantized(
                quantized, one, other, b, s, h, tokens, heads, INTERLEAVED, HALF, BLOCK,
                CONFIG.QMAX, CONFIG.TINY,
            )  # fmt: skip
        else:
            at = b * output_strides.batch + s.to(tl.int64) * output_strides.token
            at += h.to(tl.int64) * output_strides.head
            _store_pairs(outputs[i - PLAIN] + at, one, other, rows, INTERLEAVED, HALF, BLOCK)
