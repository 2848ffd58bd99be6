"""The Triton kernel that quantises Q, K and V in one launch.

A program does one of three things: it adds up a part of a head's keys, or quantises a block of
keys and values, or a block of queries. Programs of a head lie together, the parts `lead` heads
before the blocks that need them, so that K and V are still in the L2 cache at their second read.
The last part of a head to end adds all of them up in a fixed order and says so; blocks wait for
that. Parts wait for nothing and have smaller numbers than every program that waits for them, so a
wait ends on hardware that starts programs in the order of their numbers, as all GPUs do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.primitives import scratch_row, sequence
from sage_plugin.kernels.quantize.triton.block_kernels import (
    READ_ONCE,
    quantize_queries,
    store_block,
    store_whole_keys,
    store_whole_values,
    value_rows,
)
from sage_plugin.kernels.quantize.triton.prepass_arguments import (
    HeadMeans,
    KeyBlock,
    PrepassParts,
    PrepassSizes,
)
from sage_plugin.kernels.quantize.triton.reduce_kernels import COUNTERS, add_up, await_head, rows_of
from sage_plugin.kernels.quantize.triton.statistics_kernels import first_seen_key, key_terms


@triton.jit
def _tile(x, n, strides, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a sequence's head that are all there, as they are."""
    d = tl.arange(0, BLOCK_D)
    at = x + n.to(tl.int64)[:, None] * strides.row + d.to(tl.int64)[None, :] * strides.channel
    if HEAD_DIM < BLOCK_D:
        return tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0.0, eviction_policy=READ_ONCE)
    return tl.load(at, eviction_policy=READ_ONCE)


@triton.jit
def _quantize_q(
    q, outputs, statistics, cu_seqlens, strides, head, member, sizes, groups, block, multiplier,
    CONFIG: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One block of queries: scale folded in, a scale a granule of rows, and q . mean(K)."""
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    ROWS: tl.constexpr = CONFIG.Q_ROWS
    PACKED: tl.constexpr = CONFIG.PACKED
    heads, ratio = sizes.heads, sizes.ratio
    b = (head // heads).to(tl.int64)
    h = (head % heads * ratio + member).to(tl.int64)
    head = head.to(tl.int64)
    first, seq = sequence(cu_seqlens, b, sizes.seq_q, PACKED)
    start = block * ROWS
    padded = tl.cdiv(seq, BLOCK_M) * BLOCK_M
    if start < padded:
        d = tl.arange(0, BLOCK_D)
        n = tl.arange(0, ROWS)
        q = rows_of(q, strides, first, b, h, PACKED)
        q += start.to(tl.int64) * strides.row
        at = q + n.to(tl.int64)[:, None] * strides.row
        at += d.to(tl.int64)[None, :] * strides.channel
        row = scratch_row(first, b, h, heads * ratio, sizes.q_rows, BLOCK_M, PACKED) + start
        to = outputs.q8 + row * BLOCK_D + n[:, None] * BLOCK_D + d[None, :]
        live = (start + n < seq)[:, None] & (d < HEAD_DIM)[None, :]
        inside = start + n < padded
        whole = (start + ROWS <= seq) & (HEAD_DIM == BLOCK_D)
        if whole:
            x = tl.load(at, eviction_policy=READ_ONCE)
        else:
            x = tl.load(at, mask=live, other=0.0, eviction_policy=READ_ONCE)
        if CONFIG.SHIFT:  # while the queries are on their way
            if WAITS:
                await_head(statistics.counters + head * (COUNTERS + groups), CONFIG.ARRIVALS)
            mean = tl.load(statistics.k_mean + head * BLOCK_D + d)
        x = x.to(tl.float32) * multiplier
        if whole:
            quantize_queries(x, to, outputs.q_scale + row + n, inside, CONFIG, False)
        else:
            quantize_queries(x, to, outputs.q_scale + row + n, inside, CONFIG, True)
        if CONFIG.SHIFT:
            tl.store(outputs.shift + row + n, tl.sum(x * mean[None, :], 1), mask=inside)


@triton.jit
def _all_finite(counters, ARRIVALS: tl.constexpr, WAITS: tl.constexpr):
    """Whether a head's keys and values are finite, once it is known."""
    if WAITS:
        await_head(counters, ARRIVALS)
    return tl.load(counters + 1)


@triton.jit
def _quantize_kv(
    k, v, outputs, statistics, key_mask, cu_seqlens, strides, head, index, sizes, k_rows, groups,
    CONFIG: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A block of keys, or with an odd `index` of values; unseen or not finite ones are zero.

    Where a block is not whole, or its head not finite, the program of the keys does both.
    """
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    ARRIVALS: tl.constexpr = CONFIG.ARRIVALS
    MASKED: tl.constexpr = CONFIG.MASKED
    PACKED: tl.constexpr = CONFIG.PACKED
    PV8: tl.constexpr = CONFIG.PV8
    heads = sizes.heads
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    head = head.to(tl.int64)
    block = index // 2
    of_values = index % 2 == 1
    first, seq = sequence(cu_seqlens.k, b, sizes.seq_k, PACKED)
    start = block * BLOCK_N
    if start < seq:
        n = tl.arange(0, BLOCK_N)
        row = scratch_row(first, b, h, heads, k_rows, BLOCK_N, PACKED) + start
        # where this block goes
        k8 = outputs.k8 + row * BLOCK_D
        key_term = outputs.key_term + row
        k_scale = outputs.k_scale + row // BLOCK_N
        k_scale_finite = outputs.k_scale_finite + row // BLOCK_N
        v8 = outputs.v8
        if not PV8:
            v8 += row * BLOCK_D
        elif PACKED:
            v8 += h * BLOCK_D * k_rows + (first // BLOCK_N + b + block) * BLOCK_N
        else:
            v8 += head * BLOCK_D * k_rows + start
        k = rows_of(k, strides.k, first, b, h, PACKED)
        v = rows_of(v, strides.v, first, b, h, PACKED)
        k += start.to(tl.int64) * strides.k.row
        v += start.to(tl.int64) * strides.v.row
        if MASKED:
            key_mask += b * strides.mask.batch + h * strides.mask.head
        counters = statistics.counters + head * (COUNTERS + groups)
        k_mean = statistics.k_mean + head * BLOCK_D
        v_mean = statistics.v_mean + head * BLOCK_D
        v_scale = statistics.v_scale + head * BLOCK_D
        v_residual = statistics.v_residual + head * BLOCK_D
        to = KeyBlock(k8, k_scale, k_scale_finite, key_term, v8, v_residual)
        means = HeadMeans(k_mean, v_mean, v_scale)
        # which of its keys are seen: (BLOCK_N)
        first_seen = first_seen_key(
            cu_seqlens.q, b, sizes.seq_q, seq, sizes.left, CONFIG.LEFT, PACKED
        )
        inside = (start + n < seq) & (start + n >= first_seen)
        term = key_terms(key_mask, (start + n).to(tl.int64), inside, strides.mask.key, MASKED)
        whole = (start + BLOCK_N <= seq) & (start >= first_seen)
        if MASKED:
            whole = whole & (tl.max((term == float("-inf")).to(tl.int32), 0) == 0)
        done = 0
        if CONFIG.K_MEAN:
            if whole:
                if of_values:
                    if PV8:
                        w0 = _tile(v, value_rows(0, BLOCK_N), strides.v, HEAD_DIM, BLOCK_D)
                        w1 = _tile(v, value_rows(1, BLOCK_N), strides.v, HEAD_DIM, BLOCK_D)
                        w2 = _tile(v, value_rows(2, BLOCK_N), strides.v, HEAD_DIM, BLOCK_D)
                        w3 = _tile(v, value_rows(3, BLOCK_N), strides.v, HEAD_DIM, BLOCK_D)
                    else:
                        w0 = _tile(v, n, strides.v, HEAD_DIM, BLOCK_D)
                        w1 = w0
                        w2 = w0
                        w3 = w0
                    done = _all_finite(counters, ARRIVALS, WAITS)
                    if done != 0:
                        store_whole_values(to, w0, w1, w2, w3, means, k_rows, CONFIG)
                else:
                    x = _tile(k, n, strides.k, HEAD_DIM, BLOCK_D)
                    done = _all_finite(counters, ARRIVALS, WAITS)
                    if done != 0:
                        tl.store(key_term + n, term)
                        store_whole_keys(to, x, means, CONFIG)
        if (done == 0) & (not of_values):
            if WAITS:
                await_head(counters, ARRIVALS)
            store_block(to, k, v, strides, term, means, k_rows, CONFIG)


@triton.jit(
    do_not_specialize=[
        "heads", "ratio", "seq_q", "seq_k", "left", "q_rows", "parts", "groups", "group_parts",
        "part_keys", "q_blocks", "k_blocks", "lead", "ahead", "slots",
    ]
)  # fmt: skip
def prepass_kernel(
    tensors, strides, heads, ratio, seq_q, seq_k, left, q_rows, k_rows, parts, groups, group_parts,
    part_keys, q_blocks, k_blocks, lead, ahead, slots, multiplier, CONFIG: tl.constexpr,
):  # fmt: skip
    """Quantise Q, K and V; `slots` heads of keys, each with its queries.

    With `PHASE` 1 a launch has the parts of all heads and their queries, with 2 the blocks of keys
    and of values, which wait for nothing: queries fill the multiprocessors that the last parts
    leave idle. With 0 it has all:

    In front are the parts of the first `lead` heads. Then each head has the parts of the head
    `lead` further on, `ahead` blocks of queries, its blocks of keys and values, and the rest of the
    queries.
    """
    PHASE: tl.constexpr = CONFIG.PHASE
    sizes = PrepassSizes(heads, ratio, seq_q, seq_k, left, q_rows)
    cut = PrepassParts(parts, groups, group_parts, part_keys)
    outputs = tensors.outputs
    statistics = tensors.statistics
    key_mask = tensors.key_mask
    cu_seqlens = tensors.cu_seqlens
    pid = tl.program_id(0)
    if PHASE == 0:
        per_slot = parts + ratio * q_blocks + 2 * k_blocks
        late = tl.maximum(pid - lead * parts, 0)
        slot = late // per_slot
        index = late % per_slot - parts
        adds_up = (pid < lead * parts) | (index < 0)
        if pid < lead * parts:
            slot = pid // parts
            index = pid % parts
        elif index < 0:
            slot += lead
            index += parts
    elif PHASE == 1:
        adds_up = pid < slots * parts
        late = pid - slots * parts
        of_head = tl.maximum(ratio * q_blocks, 1)
        slot = tl.where(adds_up, pid // parts, late // of_head)
        index = tl.where(adds_up, pid % parts, late % of_head)
    else:
        # The end was read last and is still in the cache.
        late = 2 * slots * k_blocks - 1 - pid
        slot = late // (2 * k_blocks)
        index = late % (2 * k_blocks)
        adds_up = pid < 0
    if adds_up:
        if slot < slots:
            add_up(
                tensors.k, tensors.v, key_mask, cu_seqlens, statistics, strides, slot, index, sizes,
                cut, CONFIG,
            )  # fmt: skip
    elif PHASE == 2:
        _quantize_kv(
            tensors.k, tensors.v, outputs, statistics, key_mask, cu_seqlens, strides, slot, index,
            sizes, k_rows, groups, CONFIG, False,
        )  # fmt: skip
    elif (PHASE == 0) & (index >= ahead) & (index < ahead + 2 * k_blocks):
        _quantize_kv(
            tensors.k, tensors.v, outputs, statistics, key_mask, cu_seqlens, strides, slot,
            index - ahead, sizes, k_rows, groups, CONFIG, True,
        )  # fmt: skip
    elif CONFIG.QUERIES:
        if (PHASE == 0) & (index >= ahead):
            index -= 2 * k_blocks
        _quantize_q(
            tensors.q, outputs, statistics, cu_seqlens.q, strides.q, slot, index // q_blocks, sizes,
            groups, index % q_blocks, multiplier, CONFIG, PHASE != 2,
        )  # fmt: skip
