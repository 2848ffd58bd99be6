"""The portable attention kernel on quantised operands.

`key_term` says what a key adds to every score: 0, its bias, -inf where nobody sees it, NaN where
its row of K or V was not finite. Steps that compare positions or add a mask read it; the others
find NaN in the scale of a block that holds such a key, which all of their rows see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.primitives import (
    LN2,
    LOG2E,
    LOWEST,
    add_row,
    added_tile,
    head_group,
    hide,
    hide_finite,
    key_blocks,
    offset_of_rows,
    program_block,
    scratch_row,
    seen_bytes,
    sequence,
    soft_cap,
    store_rows,
    two_level,
    visible_keys,
    with_sink,
)

SMALLEST = tl.constexpr(1e-37)
"""Added to a scale, so that -inf times it is -inf."""


@triton.jit
def _step(
    k, v, k_scale, k_scale_finite, key_term, mask, bits, stride_mq, stride_mk, j, q, q_scale,
    row_shift, softcap, m, l, acc, first_row, seq_q, seq_k, left, right, kv_row, v_row, v_column,
    k_rows,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QK8: tl.constexpr, PV8: tl.constexpr,
    P_TYPE: tl.constexpr, OFFSET: tl.constexpr, FLUSH: tl.constexpr, TMA: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr, UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key block: scores, online softmax, P V."""
    TERMS: tl.constexpr = EDGE or MASK == 1 or MASK == 3
    block = kv_row // BN + j
    keys = j * BN + tl.arange(0, BN)
    if TMA:
        k_tile = k.load([(kv_row + j * BN).to(tl.int32), 0])
    else:
        k_tile = tl.load(k + (kv_row + keys)[:, None] * DP + tl.arange(0, DP)[None, :])
    if QK8:
        s = tl.dot(q, tl.trans(k_tile), out_dtype=tl.int32)
    else:
        s = tl.dot(q, tl.trans(k_tile))
    whole_scale = tl.load(k_scale + block)
    offset = OFFSET
    if TILE > 0:
        seen = seen_bytes(bits, j, BM, BN)
        offset = offset_of_rows(whole_scale, key_term + kv_row + j * BN, bits, j, OFFSET, BM, BN)
    if TERMS or TILE > 0:
        scale = q_scale * tl.load(k_scale_finite + block)
    else:
        scale = q_scale * whole_scale
    if TERMS or SOFTCAP or TILE == 2:
        x = s.to(tl.float32) * scale[:, None]
        if SOFTCAP:
            x = soft_cap(x + row_shift[:, None], softcap)
        if TERMS:
            x += tl.load(key_term + kv_row + keys)[None, :]
        if MASK == 3:
            x = add_row(x, mask, keys, seq_k, stride_mk)
        if TILE == 2:
            added = added_tile(mask, first_row, j, seq_q, seq_k, stride_mq, stride_mk, BM, BN, UNIT)
            x += added.to(tl.float32) * LOG2E
        if TILE > 0:
            x = hide(x, seen, BN)
        if EDGE:
            rows = first_row + tl.arange(0, BM)
            inside = visible_keys(rows, keys, seq_q, seq_k, left, right, LEFT, RIGHT)
            x = tl.where(inside, x, float("-inf"))
        top = tl.maximum(m, tl.max(x, 1))
        p = tl.math.exp2(x - (top - offset)[:, None])
    elif TILE == 1:
        x = hide_finite(s.to(tl.float32), seen, BN)
        scale += SMALLEST
        top = tl.maximum(m, tl.max(x, 1) * scale)
        p = tl.math.exp2(x * scale[:, None] - (top - offset)[:, None])
    else:
        top = tl.maximum(m, tl.max(s, 1).to(tl.float32) * scale)
        p = tl.math.exp2(s.to(tl.float32) * scale[:, None] - (top - OFFSET)[:, None])
    decay = tl.math.exp2(m - top)
    l = l * decay + tl.sum(p, 1)
    pv = p.to(P_TYPE)
    if PV8:
        pv = pv.reshape([BM, BN // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([BM, BN])
        if TMA:
            v_tile = v.load([v_row.to(tl.int32), (v_column + j * BN).to(tl.int32)])
        else:
            n = v_column + keys
            v_tile = tl.load(v + (v_row + tl.arange(0, DP))[:, None] * k_rows + n[None, :])
        v_tile = tl.trans(v_tile)
    else:
        if TMA:
            v_tile = v.load([(kv_row + j * BN).to(tl.int32), 0])
        else:
            v_tile = tl.load(v + (kv_row + keys)[:, None] * DP + tl.arange(0, DP)[None, :])
    if FLUSH == 1:
        acc = two_level(acc, decay, tl.dot(pv, v_tile))
    else:
        acc = tl.dot(pv, v_tile, acc * decay[:, None])
    return top, l, acc


@triton.jit(
    do_not_specialize=[
        "heads_q", "ratio", "seq_q", "seq_k", "q_rows", "row_blocks", "lse_rows", "left", "right",
    ]
)  # fmt: skip
def quantized_attention_kernel(
    q, k, v, o, lse, q_scale, k_scale, k_scale_finite, key_term, v_scale, v_mean, v_residual,
    v_unit, shift,
    mask, bits, lists, sinks, cu_seqlens_q, cu_seqlens_k,
    stride_ob, stride_oh, stride_os, stride_od, stride_mb, stride_mh, stride_mq, stride_mk,
    planes_b, planes_h,
    heads_q, ratio, seq_q, seq_k, q_rows, k_rows, row_blocks, lse_rows, left, right, softcap,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QK8: tl.constexpr,
    PV8: tl.constexpr, P_TYPE: tl.constexpr, OFFSET: tl.constexpr, FLUSH: tl.constexpr,
    TMA: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr,
    UNIT: tl.constexpr, GROUP: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    PACKED: tl.constexpr, LSE: tl.constexpr, SHIFT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention on quantised operands; q, k, v are pointers, or TMA descriptors when TMA is set."""
    if MASK == 2:
        block, bh = head_group(tl.program_id(0), row_blocks, RIGHT, GROUP)
    else:
        block, bh = program_block(tl.program_id(0), row_blocks, RIGHT)
    b, h = bh // heads_q, bh % heads_q
    heads_k = heads_q // ratio
    kv_head = b * heads_k + h // ratio
    first_row = block * BM
    q_first, seq_q = sequence(cu_seqlens_q, b, seq_q, PACKED)
    k_first, seq_k = sequence(cu_seqlens_k, b, seq_k, PACKED)
    if PACKED:
        if first_row >= seq_q:
            return
    rows = first_row + tl.arange(0, BM)
    d = tl.arange(0, DP)
    q_row = scratch_row(q_first, b, h, heads_q, q_rows, BM, PACKED)
    kv_row = scratch_row(k_first, b, h // ratio, heads_k, k_rows, BN, PACKED)
    if PACKED:
        v_row = (h // ratio) * DP
        v_column = (k_first // BN + b) * BN
    else:
        v_row = kv_head * DP
        v_column = tl.full([], 0, tl.int32)
    if TMA:
        q_tile = q.load([(q_row + first_row).to(tl.int32), 0])
    else:
        q_tile = tl.load(q + (q_row + rows)[:, None] * DP + d[None, :])
    row_scale = tl.load(q_scale + q_row + rows)
    row_shift = row_scale
    if SHIFT and (SOFTCAP or SINKS or LSE):
        row_shift = tl.load(shift + q_row + rows)
    elif SOFTCAP or SINKS or LSE:
        row_shift = tl.zeros([BM], tl.float32)
    if mask is not None:
        mask += b * (stride_mb // UNIT * UNIT) + h * (stride_mh // UNIT * UNIT)
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    if MASK == 2:
        key_count = tl.cdiv(seq_k, BN)
        row = (b * planes_b + h * planes_h) * row_blocks + block
        counts = lists + row * (4 + 3 * key_count)
        bits += row * key_count * (BM * BN // (32 if BN > 32 else BN))
        for kind in tl.static_range(2 if mask is None else 3):
            at = counts + 4 + kind * key_count
            j = tl.load(at)
            for i in tl.range(0, tl.load(counts + kind), num_stages=STAGES):
                m, l, acc = _step(
                    k, v, k_scale, k_scale_finite, key_term, mask, bits, stride_mq, stride_mk, j,
                    q_tile, row_scale, row_shift, softcap, m, l, acc, first_row, seq_q, seq_k, left,
                    right, kv_row, v_row, v_column, k_rows, DP, BM, BN, QK8, PV8, P_TYPE, OFFSET,
                    FLUSH, TMA, LEFT, RIGHT, MASK, UNIT, SOFTCAP, False, kind,
                )  # fmt: skip
                j = tl.load(at + i + 1)
    else:
        begin, inner, outer, end = key_blocks(
            first_row, seq_q, seq_k, left, right, BM, BN, LEFT, RIGHT
        )
        if LEFT:
            for j in tl.range(begin, inner, num_stages=1):
                m, l, acc = _step(
                    k, v, k_scale, k_scale_finite, key_term, mask, bits, stride_mq, stride_mk, j,
                    q_tile, row_scale, row_shift, softcap, m, l, acc, first_row, seq_q, seq_k, left,
                    right, kv_row, v_row, v_column, k_rows, DP, BM, BN, QK8, PV8, P_TYPE, OFFSET,
                    FLUSH, TMA, LEFT, RIGHT, MASK, UNIT, SOFTCAP, True, 0,
                )  # fmt: skip
        for j in tl.range(inner, outer, num_stages=STAGES):
            m, l, acc = _step(
                k, v, k_scale, k_scale_finite, key_term, mask, bits, stride_mq, stride_mk, j,
                q_tile, row_scale, row_shift, softcap, m, l, acc, first_row, seq_q, seq_k, left,
                right, kv_row, v_row, v_column, k_rows, DP, BM, BN, QK8, PV8, P_TYPE, OFFSET, FLUSH,
                TMA, LEFT, RIGHT, MASK, UNIT, SOFTCAP, False, 0,
            )  # fmt: skip
        for j in tl.range(outer, end, num_stages=1):
            m, l, acc = _step(
                k, v, k_scale, k_scale_finite, key_term, mask, bits, stride_mq, stride_mk, j,
                q_tile, row_scale, row_shift, softcap, m, l, acc, first_row, seq_q, seq_k, left,
                right, kv_row, v_row, v_column, k_rows, DP, BM, BN, QK8, PV8, P_TYPE, OFFSET, FLUSH,
                TMA, LEFT, RIGHT, MASK, UNIT, SOFTCAP, True, 0,
            )  # fmt: skip
    mean = tl.load(v_mean + kv_head * DP + d)
    if PV8:
        gained = tl.load(v_residual + kv_head * DP + d).to(tl.float32)
        mean -= gained * tl.load(v_unit + kv_head * DP + d)
    mean = mean[None, :]
    scale = tl.load(v_scale + kv_head * DP + d)[None, :]
    alive = l != 0.0  # NaN is alive: it has to be seen
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        before = l
        if SOFTCAP:
            m, l, decay = with_sink(m, l, tl.zeros([BM], tl.float32) + sink, OFFSET)
        else:
            m, l, decay = with_sink(m, l, sink - row_shift, OFFSET)
        out = acc * (decay / l)[:, None] * scale + mean * (before * decay / l)[:, None]
        norm = l
    else:
        norm = tl.where(alive, l, 1.0)
        out = acc / norm[:, None] * scale + mean
    out = tl.where(alive[:, None], out, 0.0)
    if PACKED:
        o += q_first * stride_os + h * stride_oh
    else:
        o += b * stride_ob + h * stride_oh
    store_rows(o, out, rows, d, seq_q, stride_os, stride_od, D)
    if LSE:
        value = tl.log2(norm) - OFFSET + m
        if SHIFT and not SOFTCAP:
            value += row_shift
        value = value * LN2
        if not SINKS:
            value = tl.where(alive, value, float("-inf"))
        if PACKED:
            lse += h * lse_rows + q_first
        else:
            lse += bh * lse_rows
        tl.store(lse + rows, value, mask=rows < seq_q)
