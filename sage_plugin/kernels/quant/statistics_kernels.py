"""Triton code of the passes before quantisation: who is seen at all, means, extremes.

Keys that no row sees and values that are not finite are left out of every statistic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.attention.primitives import mask_term, sequence, visible_keys

HUGE = tl.constexpr(1e37)
"""Channels with larger values keep their mean: subtracting it could overflow."""

SHARE = tl.constexpr(2.0**-17)
"""Part of each value that is summed, so that a sum overflows in no channel that loses its mean."""

RESIDUAL_UNITS = tl.constexpr(64.0)
"""Fixed point of the sums of rounding errors: integers add up to the same bits in any order."""


@triton.jit(do_not_specialize=["heads", "ratio", "seq_q", "seq_k", "blocks", "left", "right"])
def seen_keys_kernel(
    mask, seen, stride_b, stride_h, stride_q, stride_k, heads, ratio, seq_q, seq_k, blocks,
    left, right, ROWS: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Reduce a mask to the keys that any row of any query head of a group sees, 1 or 0.

    A mask with one row for all has a row stride of 0.
    """
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    keys = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    found = tl.zeros([BN], tl.int32)
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


@triton.jit(do_not_specialize=["heads", "seq_q", "seq", "left", "per_split", "splits"])
def statistics_kernel(
    k, v, k_sum, v_sum, v_min, v_max, alive, key_mask, cu_seqlens_q, cu_seqlens,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    stride_mb, stride_mh, stride_mk, heads, seq_q, seq, left, per_split, splits,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, K_MEAN: tl.constexpr,
    MASKED: tl.constexpr, LEFT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Partial sums of K, and sums and extremes of V, of one split of one sequence's head."""
    split = (tl.program_id(0) % splits).to(tl.int64)
    bh = (tl.program_id(0) // splits).to(tl.int64)
    b, h = bh // heads, bh % heads
    start_row, seq = sequence(cu_seqlens, b, seq, PACKED)
    first_seen = first_seen_key(cu_seqlens_q, b, seq_q, seq, left, LEFT, PACKED)
    if PACKED:
        k += start_row * stride_ks + h * stride_kh
        v += start_row * stride_vs + h * stride_vh
    else:
        k += b * stride_kb + h * stride_kh
        v += b * stride_vb + h * stride_vh
    if MASKED:
        key_mask += b * stride_mb + h * stride_mh
    d = tl.arange(0, DP)
    row = tl.arange(0, ROWS)
    k_head = k + d.to(tl.int64)[None, :] * stride_kd
    v_head = v + d.to(tl.int64)[None, :] * stride_vd
    sums_k = tl.zeros([ROWS, DP], tl.float32)
    sums_v = tl.zeros([ROWS, DP], tl.float32)
    low = tl.full([ROWS, DP], float("inf"), tl.float32)
    high = tl.full([ROWS, DP], float("-inf"), tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    first = split * per_split
    for start in range(first, tl.minimum(first + per_split, seq), ROWS):
        n = (start + row).to(tl.int64)
        here = (n < seq) & (n >= first_seen)
        if MASKED:
            here = key_terms(key_mask, n, here, stride_mk, True) != float("-inf")
        count += here.to(tl.float32)
        live = here[:, None] & (d < D)[None, :]
        x = tl.load(v_head + n[:, None] * stride_vs, mask=live, other=0.0).to(tl.float32)
        live_v = live & (tl.abs(x) < float("inf"))
        sums_v += tl.where(live_v, x, 0.0) * SHARE
        low = tl.minimum(low, tl.where(live_v, x, float("inf")))
        high = tl.maximum(high, tl.where(live_v, x, float("-inf")))
        if K_MEAN:
            y = tl.load(k_head + n[:, None] * stride_ks, mask=live, other=0.0).to(tl.float32)
            sums_k += tl.where(tl.abs(y) < float("inf"), y, 0.0) * SHARE
    at = (bh * splits + split) * DP + d
    tl.store(v_sum + at, tl.sum(sums_v, 0))
    tl.store(v_min + at, tl.min(low, 0))
    tl.store(v_max + at, tl.max(high, 0))
    if K_MEAN:
        tl.store(k_sum + at, tl.sum(sums_k, 0))
    tl.store(alive + bh * splits + split, tl.sum(count, 0))


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    k_sum, v_sum, v_min, v_max, alive, k_mean, v_mean, v_scale, v_residual, v_unit, splits,
    D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, K_MEAN: tl.constexpr,
    V_MEAN: tl.constexpr, PV8: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """Partial statistics of one head to the mean of K, and the mean and scale of V.

    `v_unit` turns the sum of rounding errors, which starts at zero here, into their mean.
    """
    bh = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    part = tl.arange(0, SPLITS)
    live = (part < splits)[:, None] & (d < D)[None, :]
    at = (bh * splits + part)[:, None] * DP + d[None, :]
    seen = tl.sum(tl.load(alive + bh * splits + part, mask=part < splits, other=0.0), 0)
    seen = tl.maximum(seen, 1.0)
    low = tl.min(tl.load(v_min + at, mask=live, other=float("inf")), 0)
    high = tl.max(tl.load(v_max + at, mask=live, other=float("-inf")), 0)
    some = low <= high
    low = tl.where(some, low, 0.0)
    high = tl.where(some, high, 0.0)
    mean = tl.zeros([DP], tl.float32)
    if V_MEAN:
        mean = tl.sum(tl.load(v_sum + at, mask=live, other=0.0), 0) / (SHARE * seen)
        mean = tl.where(tl.maximum(tl.abs(low), tl.abs(high)) < HUGE, mean, 0.0)
    amax = tl.where(d < D, tl.maximum(tl.abs(high - mean), tl.abs(low - mean)), 0.0)
    scale = tl.maximum(amax, TINY) / LIMIT
    if not PV8:
        scale = tl.where((amax >= FLOOR) & (amax <= LIMIT), 1.0, scale)
    tl.store(v_mean + bh * DP + d, mean)
    tl.store(v_scale + bh * DP + d, scale)
    if PV8:
        tl.store(v_residual + bh * DP + d, tl.zeros([DP], tl.int32))
        tl.store(v_unit + bh * DP + d, scale / (RESIDUAL_UNITS * seen))
    if K_MEAN:
        mean = tl.sum(tl.load(k_sum + at, mask=live, other=0.0), 0) / (SHARE * seen)
        tl.store(k_mean + bh * DP + d, tl.where(tl.abs(mean) < HUGE, mean, 0.0))
