"""Triton code of what comes before quantisation: who is seen at all, means, extremes.

Keys that no row sees and values that are not finite are left out of every statistic. A part of a
head's keys becomes one record of `record_size(BLOCK_D)` floats: sum of K, sum, smallest and largest
of V, each of a channel, then the number of keys seen and whether every value of theirs is finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.primitives import mask_term, sequence, visible_keys

HUGE = tl.constexpr(1e37)
"""Channels with larger values keep their mean: subtracting it could overflow."""

SHARE = tl.constexpr(2.0**-17)
"""Part of each value that is summed, so that a sum overflows in no channel that loses its mean."""

RESIDUAL_UNITS = tl.constexpr(64.0)
"""Fixed point of the sums of rounding errors: integers add up to the same bits in any order."""


@triton.jit(do_not_specialize=["heads", "ratio", "seq_q", "seq_k", "blocks", "left", "right"])
def seen_keys_kernel(
    mask, seen, stride_b, stride_h, stride_q, stride_k, heads, ratio, seq_q, seq_k, blocks,
    left, right, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Reduce a mask to the keys that any row of any query head of a group sees, 1 or 0.

    A mask with one row for all has a row stride of 0.
    """
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    keys = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    found = tl.zeros([BLOCK_N], tl.int32)
    for member in range(0, ratio):
        head = mask + b * stride_b + (h * ratio + member) * stride_h
        for start in range(0, seq_q, ROWS):
            rows = start + tl.arange(0, ROWS)
            at = head + rows.to(tl.int64)[:, None] * stride_q
            at += keys.to(tl.int64)[None, :] * stride_k
            live = (rows < seq_q)[:, None] & (keys < seq_k)[None, :]
            term = mask_term(tl.load(at, mask=live, other=0))
            visible = live & (term != float("-inf"))
            visible = visible & visible_keys(rows, keys, seq_q, seq_k, left, right, LEFT, RIGHT)
            found = tl.maximum(found, tl.max(visible.to(tl.int32), 0))
    tl.store(seen + bh * seq_k + keys, found.to(tl.uint8), mask=keys < seq_k)


@triton.jit
def first_seen_key(cu_seqlens_q, b, seq_q, seq_k, left, LEFT: tl.constexpr, PACKED: tl.constexpr):
    """The first key of a sequence that a window lets its first row see."""
    if LEFT:
        _, seq_q = sequence(cu_seqlens_q, b, seq_q, PACKED)
        return tl.maximum(seq_k - seq_q - left, 0)
    return 0


@triton.jit
def key_terms(key_mask, n, live, stride_k, MASKED: tl.constexpr):
    """What each key of a block adds to every score: its bias, -inf where nobody sees it."""
    if MASKED:
        term = mask_term(tl.load(key_mask + n * stride_k, mask=live, other=0))
    else:
        term = tl.zeros(n.shape, tl.float32)
    return tl.where(live, term, float("-inf"))


@triton.jit
def record_size(BLOCK_D: tl.constexpr):
    """Floats of a record; its last two, and what fills it up to 64 bytes, follow the channels."""
    return 4 * BLOCK_D + 16


@triton.jit
def _rows(at, live, MASKED: tl.constexpr):
    """A tile in fp32, 0 where it is not live."""
    if MASKED:
        return tl.load(at, mask=live, other=0.0).to(tl.float32)
    return tl.load(at).to(tl.float32)


@triton.jit
def _sums(
    k, v, keys, strides, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Sums and extremes of rows that are all seen; sums are not finite if a value is not."""
    d = tl.arange(0, BLOCK_D)
    row = tl.arange(0, ROWS).to(tl.int64)[:, None]
    live = (d < HEAD_DIM)[None, :]
    k += row * strides.k.row + d.to(tl.int64)[None, :] * strides.k.channel
    v += row * strides.v.row + d.to(tl.int64)[None, :] * strides.v.channel
    step = tl.full([], ROWS, tl.int64)
    share = tl.full([ROWS, BLOCK_D], SHARE, tl.float32)
    k_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    v_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    low = tl.full([ROWS, BLOCK_D], float("inf"), tl.float32)
    high = tl.full([ROWS, BLOCK_D], float("-inf"), tl.float32)
    for _ in range(0, keys, ROWS * DEPTH):
        for _ in tl.static_range(DEPTH):
            y = _rows(k, live, HEAD_DIM < BLOCK_D)
            x = _rows(v, live, HEAD_DIM < BLOCK_D)
            k_sum = tl.math.fma(y, share, k_sum)
            v_sum = tl.math.fma(x, share, v_sum)
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
            k += step * strides.k.row
            v += step * strides.v.row
    return k_sum, v_sum, low, high


@triton.jit
def _careful_sums(
    k, v, key_mask, first, last, first_seen, strides, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, K_MEAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums and extremes of the keys from `first` to `last` that are seen, and how many they are."""
    d = tl.arange(0, BLOCK_D)
    k += d.to(tl.int64)[None, :] * strides.k.channel
    v += d.to(tl.int64)[None, :] * strides.v.channel
    k_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    v_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    low = tl.full([ROWS, BLOCK_D], float("inf"), tl.float32)
    high = tl.full([ROWS, BLOCK_D], float("-inf"), tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    finite = tl.full([ROWS, BLOCK_D], 1 if K_MEAN else 0, tl.int32)
    for start in range(first, last, ROWS):
        n = (start + tl.arange(0, ROWS)).to(tl.int64)
        here = (n < last) & (n >= first_seen)
        if MASKED:
            here = key_terms(key_mask, n, here, strides.mask.key, True) != float("-inf")
        count += here.to(tl.float32)
        live = here[:, None] & (d < HEAD_DIM)[None, :]
        x = _rows(v + n[:, None] * strides.v.row, live, True)
        whole = tl.abs(x) < float("inf")
        live_v = live & whole
        v_sum += tl.where(live_v, x, 0.0) * SHARE
        low = tl.minimum(low, tl.where(live_v, x, float("inf")))
        high = tl.maximum(high, tl.where(live_v, x, float("-inf")))
        if K_MEAN:
            y = _rows(k + n[:, None] * strides.k.row, live, True)
            whole_k = tl.abs(y) < float("inf")
            k_sum += tl.where(whole_k, y, 0.0) * SHARE
            whole = whole & whole_k
        finite = tl.where(whole, finite, 0)
    return k_sum, v_sum, low, high, tl.sum(count, 0), tl.min(tl.min(finite, 1), 0)


@triton.jit
def store_record(record, k_sum, v_sum, low, high, count, finite, BLOCK_D: tl.constexpr):
    """Store a record."""
    d = tl.arange(0, BLOCK_D)
    tl.store(record + d, k_sum)
    tl.store(record + BLOCK_D + d, v_sum)
    tl.store(record + 2 * BLOCK_D + d, low)
    tl.store(record + 3 * BLOCK_D + d, high)
    tl.store(record + 4 * BLOCK_D, count)
    tl.store(record + 4 * BLOCK_D + 1, finite)


@triton.jit
def part_record(
    record, k, v, key_mask, part, part_keys, seq, first_seen, strides, CONFIG: tl.constexpr
):
    """Store the record of one part, `part_keys` keys of one head.

    Rows that are all seen and finite go by tiles as far as there are whole ones.
    """
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    ROWS: tl.constexpr = CONFIG.ROWS
    DEPTH: tl.constexpr = CONFIG.DEPTH
    K_MEAN: tl.constexpr = CONFIG.K_MEAN
    MASKED: tl.constexpr = CONFIG.MASKED
    first = part * part_keys
    last = tl.minimum(first + part_keys, seq)
    k_all = tl.zeros([BLOCK_D], tl.float32)
    v_all = tl.zeros([BLOCK_D], tl.float32)
    lowest = tl.full([BLOCK_D], float("inf"), tl.float32)
    highest = tl.full([BLOCK_D], float("-inf"), tl.float32)
    seen = tl.full([], 0.0, tl.float32)
    all_finite = tl.full([], 1, tl.int32)
    rest = first
    if K_MEAN and not MASKED:
        if first >= first_seen:
            from_row = first.to(tl.int64)
            keys = (last - first) // (ROWS * DEPTH) * (ROWS * DEPTH)
            k_sum, v_sum, low, high = _sums(
                k + from_row * strides.k.row, v + from_row * strides.v.row, keys, strides,
                HEAD_DIM, BLOCK_D, ROWS, DEPTH,
            )  # fmt: skip
            whole = (tl.abs(k_sum) < float("inf")) & (tl.abs(v_sum) < float("inf"))
            if tl.min(tl.min(whole.to(tl.int32), 1), 0) != 0:
                k_all = tl.sum(k_sum, 0)
                v_all = tl.sum(v_sum, 0)
                lowest = tl.min(low, 0)
                highest = tl.max(high, 0)
                seen = keys.to(tl.float32)
                rest = first + keys
    if rest < last:
        k_sum, v_sum, low, high, count, finite = _careful_sums(
            k, v, key_mask, rest, last, first_seen, strides, HEAD_DIM, BLOCK_D, ROWS // 2, K_MEAN,
            MASKED,
        )  # fmt: skip
        k_all += tl.sum(k_sum, 0)
        v_all += tl.sum(v_sum, 0)
        lowest = tl.minimum(lowest, tl.min(low, 0))
        highest = tl.maximum(highest, tl.max(high, 0))
        seen += count
        all_finite = finite
    store_record(
        record, k_all, v_all, lowest, highest, seen, all_finite.to(tl.float32), BLOCK_D
    )  # fmt: skip
