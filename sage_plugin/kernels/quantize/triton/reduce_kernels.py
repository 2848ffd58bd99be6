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
def rows_of(x, strides, first, b, h, PACKED: tl.constexpr):
    """The first row of a sequence's head."""
    if PACKED:
        return x + first * strides.row + h * strides.head
    return x + b * strides.batch + h * strides.head


@triton.jit
def _fold(records, count, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, K_MEAN: tl.constexpr):
    """What `count` records say together."""
    d = tl.arange(0, BLOCK_D)
    part = tl.arange(0, CHUNK)
    k_sum = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    v_sum = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    low = tl.full([CHUNK, BLOCK_D], float("inf"), tl.float32)
    high = tl.full([CHUNK, BLOCK_D], float("-inf"), tl.float32)
    keys = tl.zeros([CHUNK], tl.float32)
    finite = tl.full([CHUNK], 1.0, tl.float32)
    for start in range(0, count, CHUNK):
        here = start + part < count
        live = here[:, None]
        at = records + (start + part) * record_size(BLOCK_D)
        keys += tl.load(at + 4 * BLOCK_D, mask=here, other=0.0)
        finite = tl.minimum(finite, tl.load(at + 4 * BLOCK_D + 1, mask=here, other=1.0))
        at = at[:, None] + d[None, :]
        if K_MEAN:
            k_sum += tl.load(at, mask=live, other=0.0)
        v_sum += tl.load(at + BLOCK_D, mask=live, other=0.0)
        low = tl.minimum(low, tl.load(at + 2 * BLOCK_D, mask=live, other=float("inf")))
        high = tl.maximum(high, tl.load(at + 3 * BLOCK_D, mask=live, other=float("-inf")))
    return (
        tl.sum(k_sum, 0), tl.sum(v_sum, 0), tl.min(low, 0), tl.max(high, 0), tl.sum(keys, 0),
        tl.min(finite, 0),
    )  # fmt: skip


@triton.jit
def _fold_group(
    record, records, count, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, K_MEAN: tl.constexpr
):
    """Make one record of `count` of them."""
    k_sum, v_sum, low, high, keys, finite = _fold(records, count, BLOCK_D, CHUNK, K_MEAN)
    store_record(record, k_sum, v_sum, low, high, keys, finite, BLOCK_D)


@triton.jit
def _drifts(records, count, mean, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    """Whether the values of a channel drift along the sequence: 1 or 0.

    Deviations from the mean are summed up over the records. A sum that goes further than a random
    walk of such steps does means a trend.
    """
    d = tl.arange(0, BLOCK_D)
    part = tl.arange(0, CHUNK)
    walked = tl.zeros([BLOCK_D], tl.float32)
    furthest = tl.zeros([BLOCK_D], tl.float32)
    squares = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, count, CHUNK):
        here = start + part < count
        at = records + (start + part) * record_size(BLOCK_D)
        keys = tl.load(at + 4 * BLOCK_D, mask=here, other=0.0)
        sums = tl.load(at[:, None] + BLOCK_D + d[None, :], mask=here[:, None], other=0.0)
        steps = sums / SHARE - keys[:, None] * mean[None, :]
        walk = tl.cumsum(steps, 0) + walked[None, :]
        furthest = tl.maximum(furthest, tl.max(tl.abs(walk), 0))
        squares += tl.sum(steps * steps, 0)
        walked += tl.sum(steps, 0)
    trend = tl.max((furthest * furthest > FURTHEST_WALK * squares).to(tl.int32), 0)
    return tl.where(count < FEWEST_RECORDS, 1, trend)


@triton.jit
def _fold_head(records, count, statistics, head, counters, CONFIG: tl.constexpr):
    """The records of one head to the mean of K, and the mean and scale of V.

    `v_unit` turns the sum of rounding errors, which starts at zero here, into their mean.
    """
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    CHUNK: tl.constexpr = CONFIG.CHUNK
    LIMIT: tl.constexpr = CONFIG.LIMIT
    at = head * BLOCK_D
    k_mean = statistics.k_mean + at
    v_mean = statistics.v_mean + at
    v_scale = statistics.v_scale + at
    v_unit = statistics.v_unit + at
    v_residual = statistics.v_residual + at
    v_drifts = statistics.v_drifts + head
    all_finite = counters + 1
    d = tl.arange(0, BLOCK_D)
    k_sum, v_sum, low, high, seen, finite = _fold(records, count, BLOCK_D, CHUNK, CONFIG.K_MEAN)
    k_sum = tl.where(d < HEAD_DIM, k_sum, 0.0)
    seen = tl.maximum(seen, 1.0)
    some = (low <= high) & (d < HEAD_DIM)
    low = tl.where(some, low, 0.0)
    high = tl.where(some, high, 0.0)
    mean = tl.zeros([BLOCK_D], tl.float32)
    if CONFIG.V_MEAN:
        mean = tl.where(d < HEAD_DIM, v_sum, 0.0) / (SHARE * seen)
        mean = tl.where(tl.maximum(tl.abs(low), tl.abs(high)) < HUGE, mean, 0.0)
    amax = tl.where(d < HEAD_DIM, tl.maximum(tl.abs(high - mean), tl.abs(low - mean)), 0.0)
    scale = tl.maximum(amax, CONFIG.TINY) / LIMIT
    if not CONFIG.PV8:
        scale = tl.where((amax >= CONFIG.FLOOR) & (amax <= LIMIT), 1.0, scale)
    tl.store(v_mean + d, mean)
    tl.store(v_scale + d, scale)
    if CONFIG.PV8:
        tl.store(v_residual + d, tl.zeros([BLOCK_D], tl.int32))
        tl.store(v_unit + d, scale / (RESIDUAL_UNITS * seen))
        tl.store(v_drifts, _drifts(records, count, mean, BLOCK_D, CHUNK))
    if CONFIG.K_MEAN:
        mean = k_sum / (SHARE * seen)
        tl.store(k_mean + d, tl.where(tl.abs(mean) < HUGE, mean, 0.0))
    tl.store(all_finite, (finite > 0.0).to(tl.int32))


@triton.jit
def add_up(
    k, v, key_mask, cu_seqlens, statistics, strides, head, part, sizes, cut, CONFIG: tl.constexpr
):
    """One part of one head; the last of a group, and of the head, add up what others found."""
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    ARRIVALS: tl.constexpr = CONFIG.ARRIVALS
    CHUNK: tl.constexpr = CONFIG.CHUNK
    K_MEAN: tl.constexpr = CONFIG.K_MEAN
    PACKED: tl.constexpr = CONFIG.PACKED
    b, h = (head // sizes.heads).to(tl.int64), (head % sizes.heads).to(tl.int64)
    head = head.to(tl.int64)
    parts, groups = cut.parts, cut.groups
    first, seq = sequence(cu_seqlens.k, b, sizes.seq_k, PACKED)
    if PACKED:
        parts_here = tl.maximum(tl.cdiv(seq, cut.part_keys), 1)
        groups_here = tl.cdiv(parts_here, cut.group_parts)
    else:
        parts_here = parts
        groups_here = groups
    if part < parts_here:
        # sums and extremes of these keys, as one record
        first_seen = first_seen_key(
            cu_seqlens.q, b, sizes.seq_q, seq, sizes.left, CONFIG.LEFT, PACKED
        )
        k = rows_of(k, strides.k, first, b, h, PACKED)
        v = rows_of(v, strides.v, first, b, h, PACKED)
        if CONFIG.MASKED:
            key_mask += b * strides.mask.batch + h * strides.mask.head
        records = statistics.records + head * (parts + groups) * record_size(BLOCK_D)
        counters = statistics.counters + head * (COUNTERS + groups)
        part_record(
            records + part * record_size(BLOCK_D), k, v, key_mask, part, cut.part_keys, seq,
            first_seen, strides, CONFIG,
        )  # fmt: skip
        # the records of a group, by the last of its members
        group = part // cut.group_parts
        begin = group * cut.group_parts
        members = tl.minimum(parts_here - begin, cut.group_parts)
        last = _arrive(counters + COUNTERS + group, ARRIVALS) == members * ARRIVALS
        records_here = records + begin * record_size(BLOCK_D)
        if last & (groups_here > 1):
            _fold_group(
                records + (parts + group) * record_size(BLOCK_D), records_here, members, BLOCK_D,
                CHUNK, K_MEAN,
            )  # fmt: skip
            last = _arrive(counters + 2, ARRIVALS) == groups_here * ARRIVALS
            records_here = records + parts * record_size(BLOCK_D)
            members = groups_here
        # those of the head, by the last group
        if last:
            _fold_head(records_here, members, statistics, head, counters, CONFIG)
            _arrive(counters, ARRIVALS)
