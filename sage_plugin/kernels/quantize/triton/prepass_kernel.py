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
from sage_plugin.kernels.quantize.triton.reduce_kernels import COUNTERS, add_up, await_head, rows_of
from sage_plugin.kernels.quantize.triton.statistics_kernels import first_seen_key, key_terms


@triton.jit
def _tile(x, n, stride_s, stride_d, D: tl.constexpr, DP: tl.constexpr):
    """Rows of a sequence's head that are all there, as they are."""
    d = tl.arange(0, DP)
    at = x + n.to(tl.int64)[:, None] * stride_s + d.to(tl.int64)[None, :] * stride_d
    if D < DP:
        return tl.load(at, mask=(d < D)[None, :], other=0.0, eviction_policy=READ_ONCE)
    return tl.load(at, eviction_policy=READ_ONCE)


@triton.jit
def _quantize_q(
    q, q8, q_scale, shift, k_mean, counters, cu_seqlens, stride_qb, stride_qh, stride_qs,
    stride_qd, head, member, heads, ratio, seq, q_rows, groups, block, multiplier,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, QK8: tl.constexpr,
    QMAX: tl.constexpr, TINY: tl.constexpr, SHIFT: tl.constexpr, TURNS: tl.constexpr,
    GRANULE: tl.constexpr, ARRIVALS: tl.constexpr, PACKED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One block of queries: scale folded in, a scale a granule of rows, and q . mean(K)."""
    b = (head // heads).to(tl.int64)
    h = (head % heads * ratio + member).to(tl.int64)
    head = head.to(tl.int64)
    first, seq = sequence(cu_seqlens, b, seq, PACKED)
    start = block * ROWS
    padded = tl.cdiv(seq, BM) * BM
    if start < padded:
        d = tl.arange(0, DP)
        n = tl.arange(0, ROWS)
        q = rows_of(q, first, b, h, stride_qb, stride_qh, stride_qs, PACKED)
        q += start.to(tl.int64) * stride_qs
        at = q + n.to(tl.int64)[:, None] * stride_qs + d.to(tl.int64)[None, :] * stride_qd
        row = scratch_row(first, b, h, heads * ratio, q_rows, BM, PACKED) + start
        to = q8 + row * DP + n[:, None] * DP + d[None, :]
        live = (start + n < seq)[:, None] & (d < D)[None, :]
        inside = start + n < padded
        whole = (start + ROWS <= seq) & (D == DP)
        if whole:
            x = tl.load(at, eviction_policy=READ_ONCE)
        else:
            x = tl.load(at, mask=live, other=0.0, eviction_policy=READ_ONCE)
        if SHIFT:  # while the queries are on their way
            if WAITS:
                await_head(counters + head * (COUNTERS + groups), ARRIVALS)
            mean = tl.load(k_mean + head * DP + d)
        x = x.to(tl.float32) * multiplier
        if whole:
            quantize_queries(
                x, to, q_scale + row + n, inside, ROWS, D, DP, QK8, QMAX, TINY, TURNS, GRANULE,
                False,
            )  # fmt: skip
        else:
            quantize_queries(
                x, to, q_scale + row + n, inside, ROWS, D, DP, QK8, QMAX, TINY, TURNS, GRANULE,
                True,
            )  # fmt: skip
        if SHIFT:
            tl.store(shift + row + n, tl.sum(x * mean[None, :], 1), mask=inside)


@triton.jit
def _all_finite(counters, ARRIVALS: tl.constexpr, WAITS: tl.constexpr):
    """Whether a head's keys and values are finite, once it is known."""
    if WAITS:
        await_head(counters, ARRIVALS)
    return tl.load(counters + 1)


@triton.jit
def _quantize_kv(
    k, v, k8, v8, k_scale, k_scale_finite, key_term, k_mean, v_mean, v_scale, v_residual, counters,
    key_mask, cu_seqlens_q, cu_seqlens_k, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb,
    stride_vh, stride_vs, stride_vd, stride_mb, stride_mh, stride_mk, head, index, heads, seq_q,
    seq, left, k_rows, groups,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, QK8: tl.constexpr, QMAX: tl.constexpr,
    TINY: tl.constexpr, PV8: tl.constexpr, VMAX: tl.constexpr, K_MEAN: tl.constexpr,
    TURNS: tl.constexpr, ARRIVALS: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr,
    PACKED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A block of keys, or with an odd `index` of values; unseen or not finite ones are zero.

    Where a block is not whole, or its head not finite, the program of the keys does both.
    """
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    head = head.to(tl.int64)
    block = index // 2
    of_values = index % 2 == 1
    first, seq = sequence(cu_seqlens_k, b, seq, PACKED)
    start = block * BN
    if start < seq:
        n = tl.arange(0, BN)
        row = scratch_row(first, b, h, heads, k_rows, BN, PACKED) + start
        k8 += row * DP
        key_term += row
        k_scale += row // BN
        k_scale_finite += row // BN
        if not PV8:
            v8 += row * DP
        elif PACKED:
            v8 += h * DP * k_rows + (first // BN + b + block) * BN
        else:
            v8 += head * DP * k_rows + start
        k = rows_of(k, first, b, h, stride_kb, stride_kh, stride_ks, PACKED)
        v = rows_of(v, first, b, h, stride_vb, stride_vh, stride_vs, PACKED)
        k += start.to(tl.int64) * stride_ks
        v += start.to(tl.int64) * stride_vs
        if MASKED:
            key_mask += b * stride_mb + h * stride_mh
        counters += head * (COUNTERS + groups)
        k_mean += head * DP
        v_mean += head * DP
        v_scale += head * DP
        v_residual += head * DP
        first_seen = first_seen_key(cu_seqlens_q, b, seq_q, seq, left, LEFT, PACKED)
        inside = (start + n < seq) & (start + n >= first_seen)
        term = key_terms(key_mask, (start + n).to(tl.int64), inside, stride_mk, MASKED)
        whole = (start + BN <= seq) & (start >= first_seen)
        if MASKED:
            whole = whole & (tl.max((term == float("-inf")).to(tl.int32), 0) == 0)
        done = 0
        if K_MEAN:
            if whole:
                if of_values:
                    if PV8:
                        w0 = _tile(v, value_rows(0, BN), stride_vs, stride_vd, D, DP)
                        w1 = _tile(v, value_rows(1, BN), stride_vs, stride_vd, D, DP)
                        w2 = _tile(v, value_rows(2, BN), stride_vs, stride_vd, D, DP)
                        w3 = _tile(v, value_rows(3, BN), stride_vs, stride_vd, D, DP)
                    else:
                        w0 = _tile(v, n, stride_vs, stride_vd, D, DP)
                        w1 = w0
                        w2 = w0
                        w3 = w0
                    done = _all_finite(counters, ARRIVALS, WAITS)
                    if done != 0:
                        store_whole_values(
                            v8, v_residual, w0, w1, w2, w3, v_mean, v_scale, k_rows, BN, DP, PV8,
                            VMAX,
                        )  # fmt: skip
                else:
                    x = _tile(k, n, stride_ks, stride_kd, D, DP)
                    done = _all_finite(counters, ARRIVALS, WAITS)
                    if done != 0:
                        tl.store(key_term + n, term)
                        store_whole_keys(
                            k8, k_scale, k_scale_finite, x, k_mean, D, BN, DP, QK8, QMAX, TINY,
                            TURNS,
                        )  # fmt: skip
        if (done == 0) & (not of_values):
            if WAITS:
                await_head(counters, ARRIVALS)
            store_block(
                k8, k_scale, k_scale_finite, key_term, v8, v_residual, k, v, stride_ks, stride_kd,
                stride_vs, stride_vd, term, k_mean, v_mean, v_scale, k_rows, D, BN, DP, QK8, QMAX,
                TINY, PV8, VMAX, TURNS, K_MEAN,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "heads", "ratio", "seq_q", "seq_k", "left", "q_rows", "parts", "groups", "group_parts",
        "part_keys", "q_blocks", "k_blocks", "lead", "ahead", "slots",
    ]
)  # fmt: skip
def prepass_kernel(
    q, k, v, q8, k8, v8, q_scale, shift, k_scale, k_scale_finite, key_term, k_mean, v_mean,
    v_scale, v_unit, v_residual, v_drifts, records, counters, key_mask, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_mb, stride_mh, stride_mk,
    heads, ratio, seq_q, seq_k, left, q_rows, k_rows, parts, groups, group_parts, part_keys,
    q_blocks, k_blocks, lead, ahead, slots, multiplier,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, Q_ROWS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    ARRIVALS: tl.constexpr, QK8: tl.constexpr, QMAX: tl.constexpr, TINY: tl.constexpr,
    PV8: tl.constexpr, VMAX: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    K_MEAN: tl.constexpr, V_MEAN: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr,
    TURNS: tl.constexpr, GRANULE: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """Quantise Q, K and V; `slots` heads of keys, each with its queries.

    With `PHASE` 1 a launch has the parts of all heads and their queries, with 2 the blocks of keys
    and of values, which wait for nothing: queries fill the multiprocessors that the last parts
    leave idle. With 0 it has all:

    In front are the parts of the first `lead` heads. Then each head has the parts of the head
    `lead` further on, `ahead` blocks of queries, its blocks of keys and values, and the rest of the
    queries.
    """
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
                k, v, key_mask, cu_seqlens_q, cu_seqlens_k, records, counters, k_mean, v_mean,
                v_scale, v_unit, v_residual, v_drifts, stride_kb, stride_kh, stride_ks, stride_kd,
                stride_vb, stride_vh, stride_vs, stride_vd, stride_mb, stride_mh, stride_mk,
                slot, index, heads, seq_q, seq_k, left, parts, groups, group_parts, part_keys,
                D, DP, ROWS, DEPTH, CHUNK, ARRIVALS, K_MEAN, V_MEAN, PV8, LIMIT, FLOOR, TINY,
                MASKED, LEFT, PACKED,
            )  # fmt: skip
    elif PHASE == 2:
        _quantize_kv(
            k, v, k8, v8, k_scale, k_scale_finite, key_term, k_mean, v_mean, v_scale, v_residual,
            counters, key_mask, cu_seqlens_q, cu_seqlens_k, stride_kb, stride_kh, stride_ks,
            stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_mb, stride_mh, stride_mk,
            slot, index, heads, seq_q, seq_k, left, k_rows, groups, D, DP, BN, QK8,
            QMAX, TINY, PV8, VMAX, K_MEAN, TURNS, ARRIVALS, MASKED, LEFT, PACKED, False,
        )  # fmt: skip
    elif (PHASE == 0) & (index >= ahead) & (index < ahead + 2 * k_blocks):
        _quantize_kv(
            k, v, k8, v8, k_scale, k_scale_finite, key_term, k_mean, v_mean, v_scale, v_residual,
            counters, key_mask, cu_seqlens_q, cu_seqlens_k, stride_kb, stride_kh, stride_ks,
            stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_mb, stride_mh, stride_mk,
            slot, index - ahead, heads, seq_q, seq_k, left, k_rows, groups, D, DP, BN, QK8,
            QMAX, TINY, PV8, VMAX, K_MEAN, TURNS, ARRIVALS, MASKED, LEFT, PACKED, True,
        )  # fmt: skip
    else:
        if (PHASE == 0) & (index >= ahead):
            index -= 2 * k_blocks
        _quantize_q(
            q, q8, q_scale, shift, k_mean, counters, cu_seqlens_q, stride_qb, stride_qh, stride_qs,
            stride_qd, slot, index // q_blocks, heads, ratio, seq_q, q_rows, groups,
            index % q_blocks, multiplier, D, DP, Q_ROWS, BM, QK8, QMAX, TINY, SHIFT, TURNS,
            GRANULE, ARRIVALS, PACKED, PHASE != 2,
        )  # fmt: skip
