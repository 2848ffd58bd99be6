"""Triton code that makes the records of a head's parts into its means and scales.

Records are added up in the order of their parts, whoever ends last, so that the same call gives the
same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.primitives import sequence
from sage_plugin.kernels.quantize.triton.statistics_kernels import (
    HUGE,
    RESIDUAL_UNITS,
    SHARE,
    first_seen_key,
    part_record,
    record_size,
    store_record,
)

FURTHEST_WALK = tl.constexpr(5.0)
"""Square of how far, in standard deviations, sums of values without a trend may walk: one channel
in ten thousand goes further, 2 exp(-2 * 5)."""

FEWEST_RECORDS = tl.constexpr(24)
"""Under it a trend cannot be told from a walk, and is taken for granted."""

COUNTERS = tl.constexpr(4)
"""Counters of a head before those of its groups: ready, all finite, groups done, one to spare."""


@triton.jit
def _arrive(counter, ARRIVALS: tl.constexpr):
    """Say that what this program stored is there, and tell how many arrivals there were by then.

    With one arrival a program, a barrier collects what its threads stored. AMD's barrier does not
    wait for stores, so there each thread arrives for itself.
    """
    if ARRIVALS == 1:
        tl.debug_barrier()
        return tl.atomic_add(counter, 1, sem="acq_rel") + 1
    each = tl.atomic_add(counter + tl.zeros([ARRIVALS], tl.int32), 1, sem="acq_rel")
    return tl.max(each, 0) + 1


@triton.jit
def await_head(counter, ARRIVALS: tl.constexpr):
    """Wait until the one program that makes it ready has arrived."""
    arrived = tl.atomic_add(counter, 0, sem="acquire")
    while arrived < ARRIVALS:
        arrived = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def rows_of(x, first, b, h, stride_b, stride_h, stride_s, PACKED: tl.constexpr):
    """The first row of a sequence's head."""
    if PACKED:
        return x + first * stride_s + h * stride_h
    return x + b * stride_b + h * stride_h


@triton.jit
def _fold(records, count, DP: tl.constexpr, CHUNK: tl.constexpr, K_MEAN: tl.constexpr):
    """What `count` records say together."""
    d = tl.arange(0, DP)
    part = tl.arange(0, CHUNK)
    k_sum = tl.zeros([CHUNK, DP], tl.float32)
    v_sum = tl.zeros([CHUNK, DP], tl.float32)
    low = tl.full([CHUNK, DP], float("inf"), tl.float32)
    high = tl.full([CHUNK, DP], float("-inf"), tl.float32)
    keys = tl.zeros([CHUNK], tl.float32)
    finite = tl.full([CHUNK], 1.0, tl.float32)
    for start in range(0, count, CHUNK):
        here = start + part < count
        live = here[:, None]
        at = records + (start + part) * record_size(DP)
        keys += tl.load(at + 4 * DP, mask=here, other=0.0)
        finite = tl.minimum(finite, tl.load(at + 4 * DP + 1, mask=here, other=1.0))
        at = at[:, None] + d[None, :]
        if K_MEAN:
            k_sum += tl.load(at, mask=live, other=0.0)
        v_sum += tl.load(at + DP, mask=live, other=0.0)
        low = tl.minimum(low, tl.load(at + 2 * DP, mask=live, other=float("inf")))
        high = tl.maximum(high, tl.load(at + 3 * DP, mask=live, other=float("-inf")))
    return (
        tl.sum(k_sum, 0), tl.sum(v_sum, 0), tl.min(low, 0), tl.max(high, 0), tl.sum(keys, 0),
        tl.min(finite, 0),
    )  # fmt: skip


@triton.jit
def _fold_group(
    record, records, count, DP: tl.constexpr, CHUNK: tl.constexpr, K_MEAN: tl.constexpr
):
    """Make one record of `count` of them."""
    k_sum, v_sum, low, high, keys, finite = _fold(records, count, DP, CHUNK, K_MEAN)
    store_record(record, k_sum, v_sum, low, high, keys, finite, DP)


@triton.jit
def _drifts(records, count, mean, DP: tl.constexpr, CHUNK: tl.constexpr):
    """Whether the values of a channel drift along the sequence: 1 or 0.

    Deviations from the mean are summed up over the records. A sum that goes further than a random
    walk of such steps does means a trend.
    """
    d = tl.arange(0, DP)
    part = tl.arange(0, CHUNK)
    walked = tl.zeros([DP], tl.float32)
    furthest = tl.zeros([DP], tl.float32)
    squares = tl.zeros([DP], tl.float32)
    for start in range(0, count, CHUNK):
        here = start + part < count
        at = records + (start + part) * record_size(DP)
        keys = tl.load(at + 4 * DP, mask=here, other=0.0)
        sums = tl.load(at[:, None] + DP + d[None, :], mask=here[:, None], other=0.0)
        steps = sums / SHARE - keys[:, None] * mean[None, :]
        walk = tl.cumsum(steps, 0) + walked[None, :]
        furthest = tl.maximum(furthest, tl.max(tl.abs(walk), 0))
        squares += tl.sum(steps * steps, 0)
        walked += tl.sum(steps, 0)
    trend = tl.max((furthest * furthest > FURTHEST_WALK * squares).to(tl.int32), 0)
    return tl.where(count < FEWEST_RECORDS, 1, trend)


@triton.jit
def _fold_head(
    records, count, k_mean, v_mean, v_scale, v_unit, v_residual, v_drifts, all_finite,
    D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, K_MEAN: tl.constexpr,
    V_MEAN: tl.constexpr, PV8: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """The records of one head to the mean of K, and the mean and scale of V.

    `v_unit` turns the sum of rounding errors, which starts at zero here, into their mean.
    """
    d = tl.arange(0, DP)
    k_sum, v_sum, low, high, seen, finite = _fold(records, count, DP, CHUNK, K_MEAN)
    k_sum = tl.where(d < D, k_sum, 0.0)
    seen = tl.maximum(seen, 1.0)
    some = (low <= high) & (d < D)
    low = tl.where(some, low, 0.0)
    high = tl.where(some, high, 0.0)
    mean = tl.zeros([DP], tl.float32)
    if V_MEAN:
        mean = tl.where(d < D, v_sum, 0.0) / (SHARE * seen)
        mean = tl.where(tl.maximum(tl.abs(low), tl.abs(high)) < HUGE, mean, 0.0)
    amax = tl.where(d < D, tl.maximum(tl.abs(high - mean), tl.abs(low - mean)), 0.0)
    scale = tl.maximum(amax, TINY) / LIMIT
    if not PV8:
        scale = tl.where((amax >= FLOOR) & (amax <= LIMIT), 1.0, scale)
    tl.store(v_mean + d, mean)
    tl.store(v_scale + d, scale)
    if PV8:
        tl.store(v_residual + d, tl.zeros([DP], tl.int32))
        tl.store(v_unit + d, scale / (RESIDUAL_UNITS * seen))
        tl.store(v_drifts, _drifts(records, count, mean, DP, CHUNK))
    if K_MEAN:
        mean = k_sum / (SHARE * seen)
        tl.store(k_mean + d, tl.where(tl.abs(mean) < HUGE, mean, 0.0))
    tl.store(all_finite, (finite > 0.0).to(tl.int32))


@triton.jit
def add_up(
    k, v, key_mask, cu_seqlens_q, cu_seqlens_k, records, counters, k_mean, v_mean, v_scale, v_unit,
    v_residual, v_drifts, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh,
    stride_vs, stride_vd, stride_mb, stride_mh, stride_mk, head, part, heads, seq_q, seq_k, left,
    parts, groups, group_parts, part_keys,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, ARRIVALS: tl.constexpr, K_MEAN: tl.constexpr,
    V_MEAN: tl.constexpr, PV8: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TINY: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One part of one head; the last of a group, and of the head, add up what others found."""
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    head = head.to(tl.int64)
    first, seq = sequence(cu_seqlens_k, b, seq_k, PACKED)
    if PACKED:
        parts_here = tl.maximum(tl.cdiv(seq, part_keys), 1)
        groups_here = tl.cdiv(parts_here, group_parts)
    else:
        parts_here = parts
        groups_here = groups
    if part < parts_here:
        first_seen = first_seen_key(cu_seqlens_q, b, seq_q, seq, left, LEFT, PACKED)
        k = rows_of(k, first, b, h, stride_kb, stride_kh, stride_ks, PACKED)
        v = rows_of(v, first, b, h, stride_vb, stride_vh, stride_vs, PACKED)
        if MASKED:
            key_mask += b * stride_mb + h * stride_mh
        records += head * (parts + groups) * record_size(DP)
        counters += head * (COUNTERS + groups)
        part_record(
            records + part * record_size(DP), k, v, key_mask, part, part_keys, seq, first_seen,
            stride_ks, stride_kd, stride_vs, stride_vd, stride_mk, D, DP, ROWS, DEPTH, K_MEAN,
            MASKED,
        )  # fmt: skip
        group = part // group_parts
        begin = group * group_parts
        members = tl.minimum(parts_here - begin, group_parts)
        last = _arrive(counters + COUNTERS + group, ARRIVALS) == members * ARRIVALS
        records_here = records + begin * record_size(DP)
        if last & (groups_here > 1):
            _fold_group(
                records + (parts + group) * record_size(DP), records_here, members, DP, CHUNK,
                K_MEAN,
            )  # fmt: skip
            last = _arrive(counters + 2, ARRIVALS) == groups_here * ARRIVALS
            records_here = records + parts * record_size(DP)
            members = groups_here
        if last:
            at = head * DP
            _fold_head(
                records_here, members, k_mean + at, v_mean + at, v_scale + at, v_unit + at,
                v_residual + at, v_drifts + head, counters + 1, D, DP, CHUNK, K_MEAN, V_MEAN, PV8,
                LIMIT, FLOOR, TINY,
            )  # fmt: skip
            _arrive(counters, ARRIVALS)
