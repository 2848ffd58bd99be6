"""Triton code that the portable attention kernels share: which keys a row sees, sums, stores.

Grid: one program a block of query rows of one head, folded into the first grid axis (B*H may pass
65,535). A program visits the key blocks that any of its rows sees: blocks that all of its rows see
run without comparisons, the edges of a window, the diagonal and the tail with them. Scores live in
log2 units; a row's maximum starts at a finite value so that rows without a visible key end with an
empty sum, and become 0 with LSE -inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3e38)
"""First maximum of a row: finite, and under every score that can be seen."""

HIDES = tl.constexpr(-1e38)
"""`contract.HIDES`."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Strides(NamedTuple):
    """Strides of a tensor of four dimensions."""

    batch: Any
    head: Any
    row: Any
    channel: Any


class StridedTensor(NamedTuple):
    """A head of a tensor, in a kernel: where it begins, and its strides."""

    at: Any
    strides: Any


class SlidingWindow(NamedTuple):
    """How many keys before and after its own a row sees, in a kernel."""

    left: Any
    right: Any


class SequenceEnds(NamedTuple):
    """Cumulative lengths of packed sequences, `None` where each has a batch item."""

    q: Any
    k: Any


@triton.jit
def program_block(pid, row_blocks, REVERSED: tl.constexpr):
    """Row block and head of a program; long causal rows first, so that the last wave is short."""
    block = pid % row_blocks
    if REVERSED:
        block = row_blocks - 1 - block
    return block, (pid // row_blocks).to(tl.int64)


@triton.jit
def sequence(cu_seqlens, b, seq, PACKED: tl.constexpr):
    """First row and length of a sequence: of a packed one, or of a batch item (which is all)."""
    if PACKED:
        first = tl.load(cu_seqlens + b)
        return first.to(tl.int64), tl.load(cu_seqlens + b + 1) - first
    return tl.full([], 0, tl.int64), seq


@triton.jit
def scratch_row(first, b, h, heads, rows, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """First scratch row of a sequence's head, a multiple of the block.

    Every packed sequence starts at a whole block of its own: after b sequences of `first` rows in
    all, `first // BLOCK + b` blocks are enough whatever the lengths were.
    """
    if PACKED:
        return h * rows + (first // BLOCK + b) * BLOCK
    return (b * heads + h) * rows


@triton.jit
def head_rows(x, strides, first, b, h, ratio, PACKED: tl.constexpr):
    """First row of a sequence's head, which `ratio` query heads share; packed ones lie in a row."""
    if PACKED:
        return x + (first * strides.row + (h // ratio) * strides.head)
    return x + (b * strides.batch + (h // ratio) * strides.head)


@triton.jit
def key_blocks(
    first_row, seq_q, seq_k, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Key blocks of a program: first, first and last that need no comparison, last."""
    diagonal = seq_k - seq_q
    low = 0
    all_from = 0
    if LEFT:
        low = tl.maximum(first_row + diagonal - left, 0)
        all_from = tl.maximum(first_row + BLOCK_M - 1 + diagonal - left, 0)
    high = seq_k
    all_to = seq_k
    if RIGHT:
        high = tl.maximum(tl.minimum(seq_k, first_row + BLOCK_M + diagonal + right), 0)
        all_to = tl.maximum(tl.minimum(seq_k, first_row + 1 + diagonal + right), 0)
    end = tl.cdiv(high, BLOCK_N)
    begin = tl.minimum(low // BLOCK_N, end)
    inner = tl.minimum(tl.cdiv(all_from, BLOCK_N), end)
    return begin, inner, tl.maximum(all_to // BLOCK_N, inner), end


@triton.jit
def visible_keys(rows, keys, seq_q, seq_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """`(1 or BLOCK_M, BLOCK_N)`: which keys each row sees, as far as positions tell."""
    seen = (keys < seq_k)[None, :]
    if RIGHT:
        seen = seen & (keys[None, :] <= (rows + (seq_k - seq_q + right))[:, None])
    if LEFT:
        seen = seen & (keys[None, :] >= (rows + (seq_k - seq_q - left))[:, None])
    return seen


@triton.jit
def mask_term(value):
    """A mask value as it is added to a score in log2 units; NaN stays NaN."""
    if value.dtype == tl.uint8:
        return tl.where(value != 0, 0.0, float("-inf"))
    bias = value.to(tl.float32)
    return tl.where(bias < HIDES, float("-inf"), bias * LOG2E)


@triton.jit
def add_row(x, mask, keys, seq_k, stride_k):
    """Scores with a mask added that has one row for all."""
    at = mask + keys.to(tl.int64) * stride_k
    term = mask_term(tl.load(at, mask=keys < seq_k, other=0))[None, :]
    return tl.where(term == float("-inf"), float("-inf"), x + term)


@triton.jit
def head_group(pid, row_blocks, REVERSED: tl.constexpr, GROUP: tl.constexpr):
    """`program_block` with GROUP heads side by side, which read the same part of their mask."""
    span = row_blocks * GROUP
    first = pid // span * GROUP
    width = tl.minimum(tl.num_programs(0) // row_blocks - first, GROUP)
    block = pid % span // width
    if REVERSED:
        block = row_blocks - 1 - block
    return block, (first + pid % span % width).to(tl.int64)


@triton.jit
def key_bit(n):
    """Which bit of its word tells of a key.

    The keys that a thread holds of the accumulator of a product on NVIDIA, two of every eight, have
    the bits of one byte: each is tested with a constant.
    """
    return n // 2 % 4 * 8 + n // 8 % 4 * 2 + n % 2


@triton.jit
def seen_bytes(bits, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`(BLOCK_M, BLOCK_N)`: the word of each row and key, its key's byte shifted to the front."""
    WORDS: tl.constexpr = BLOCK_N // 32 if BLOCK_N > 32 else 1
    n = tl.arange(0, BLOCK_N)
    at = bits + tile.to(tl.int64) * (BLOCK_M * WORDS) + tl.arange(0, BLOCK_M)
    words = tl.broadcast_to(tl.load(at)[:, None], [BLOCK_M, BLOCK_N])
    for part in tl.static_range(1, WORDS):
        later = tl.load(at + part * BLOCK_M)
        words = tl.where((n >= part * 32)[None, :], later[:, None], words)
    return words >> (n // 2 % 4 * 8)[None, :]


@triton.jit
def hide(x, seen, BLOCK_N: tl.constexpr):
    """A tile of scores, -inf for keys that their row does not see.

    In integers: a choice by bits becomes a vector of bits, which LLVM packs and unpacks.
    """
    n = tl.arange(0, BLOCK_N)
    shown = (seen << (31 - n // 8 % 4 * 2 - n % 2)[None, :]) >> 31
    bits = (x.to(tl.int32, bitcast=True) & shown) | (~shown & -0x800000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def hide_finite(x, seen, BLOCK_N: tl.constexpr):
    """`hide` for numbers that are all finite: -inf is added, for which other units have time.

    A product moves the bit of a hidden key to the exponent and all bits above.
    """
    n = tl.arange(0, BLOCK_N)
    bit = n // 8 % 4 * 2 + n % 2
    hidden = ~seen & (1 << bit)[None, :]
    return x + (hidden * (-(1 << (23 - bit)))[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def offset_of_rows(
    scale, term, bits, tile, OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`(BLOCK_M)`: NaN for rows of a tile that see a key that is not finite, else OFFSET.

    A NaN in the scale of the tile's keys tells that it has one, and the keys' terms which.
    """
    WORD: tl.constexpr = 32 if BLOCK_N > 32 else BLOCK_N
    n = tl.arange(0, WORD)
    at = bits + tile.to(tl.int64) * (BLOCK_M * BLOCK_N // WORD) + tl.arange(0, BLOCK_M)
    hit = tl.zeros([BLOCK_M], tl.int32)
    for part in tl.static_range(BLOCK_N // WORD):
        bad = tl.full([], 0, tl.int32)
        if scale != scale:
            value = tl.load(term + part * WORD + n)
            bad = tl.sum(tl.where(value != value, 1 << key_bit(n), 0), 0)
        hit |= tl.load(at + part * BLOCK_M) & bad
    return tl.where(hit != 0, float("nan"), OFFSET)


@triton.jit
def added_tile(
    mask, first_row, j, seq_q, seq_k, stride_q, stride_k, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """`(BLOCK_M, BLOCK_N)` of the values of a float mask; UNIT divides its lengths and strides.

    Offsets are 64-bit up to the tile and 32-bit inside of it.
    """
    m = tl.minimum(tl.arange(0, BLOCK_M), seq_q - 1 - first_row)
    n = tl.arange(0, BLOCK_N)
    stride_q = stride_q // UNIT * UNIT
    base = mask + first_row.to(tl.int64) * stride_q + j.to(tl.int64) * BLOCK_N * stride_k
    live = (n < seq_k // UNIT * UNIT - j * BLOCK_N)[None, :]
    return tl.load(base + (m[:, None] * stride_q + n[None, :] * stride_k), mask=live, other=0)


@triton.jit
def soft_cap(x, cap):
    """`cap * tanh(x / cap)`, right for any x."""
    return cap * (1.0 - 2.0 / (tl.math.exp2(x * (2.0 * LOG2E) / cap) + 1.0))


@triton.jit
def two_level(acc, alpha, partial):
    """Rescale the fp32 sum and add a block's partial product outside of the tensor core.

    Tensor cores truncate while they accumulate; an explicit fma keeps the compiler from folding the
    addition back into the product.
    """
    return tl.math.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), partial)


@triton.jit
def with_sink(m_i, l_i, sink, OFFSET: tl.constexpr):
    """Row maximum and sum with one more logit, and the factor of what was summed before."""
    m_new = tl.maximum(m_i, sink)
    alpha = tl.math.exp2(m_i - m_new)
    return m_new, l_i * alpha + tl.math.exp2(sink - (m_new - OFFSET)), alpha


@triton.jit
def store_rows(o, tile, offs_m, offs_d, seq_q, strides, HEAD_DIM: tl.constexpr):
    """Store a `(BLOCK_M, BLOCK_D)` tile to the rows of one sequence's head."""
    at = o + offs_m.to(tl.int64)[:, None] * strides.row
    at += offs_d.to(tl.int64)[None, :] * strides.channel
    live = (offs_m < seq_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(at, tile.to(o.dtype.element_ty), mask=live)
