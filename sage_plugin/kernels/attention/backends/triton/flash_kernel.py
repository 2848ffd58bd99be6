"""The portable attention kernel on tensors as they are: FlashAttention-2, read in place."""

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
    key_blocks,
    program_block,
    seen_bytes,
    sequence,
    soft_cap,
    store_rows,
    two_level,
    visible_keys,
    with_sink,
)


@triton.jit
def _step(
    k, v, stride_ks, stride_kd, stride_vs, stride_vd, mask, bits, stride_mq, stride_mk, j, q, scale,
    softcap, m, l, acc, first_row, seq_q, seq_k, left, right,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FLUSH: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr, UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key block; where a key can be hidden, what is not finite in V is kept out of P V."""
    HIDES: tl.constexpr = EDGE or TILE > 0 or MASK == 3
    if TILE > 0:
        seen = seen_bytes(bits, j, BM, BN)
    d = tl.arange(0, DP)
    n = j * BN + tl.arange(0, BN)
    n64 = n.to(tl.int64)
    d64 = d.to(tl.int64)
    k_at = k + n64[:, None] * stride_ks + d64[None, :] * stride_kd
    v_at = v + n64[:, None] * stride_vs + d64[None, :] * stride_vd
    if EDGE or TILE > 0 or D != DP:
        live = (n < seq_k)[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_at, mask=live, other=0.0)
        v_tile = tl.load(v_at, mask=live, other=0.0)
    else:
        k_tile = tl.load(k_at)
        v_tile = tl.load(v_at)
    if q.dtype == k_tile.dtype:
        s = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale
    else:
        wide = tl.trans(k_tile.to(tl.float32))
        s = tl.dot(q.to(tl.float32), wide, input_precision="ieee") * scale
    if SOFTCAP:
        s = soft_cap(s, softcap)
    if HIDES:
        finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
        bad = tl.max(tl.where(finite, 0, 1), 1) > 0
        v_tile = tl.where(finite, v_tile, 0.0)
        s += tl.where(bad, float("nan"), 0.0)[None, :]
    if MASK == 3:
        s = add_row(s, mask, n, seq_k, stride_mk)
    if TILE == 2:
        added = added_tile(mask, first_row, j, seq_q, seq_k, stride_mq, stride_mk, BM, BN, UNIT)
        s += added.to(tl.float32) * LOG2E
    if TILE > 0:
        s = hide(s, seen, BN)
    if EDGE:
        rows = first_row + tl.arange(0, BM)
        seen = visible_keys(rows, n, seq_q, seq_k, left, right, LEFT, RIGHT)
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - top[:, None])
    decay = tl.math.exp2(m - top)
    l = l * decay + tl.sum(p, 1)
    p = p.to(v_tile.dtype)
    if FLUSH == 1:
        acc = two_level(acc, decay, tl.dot(p, v_tile, input_precision="ieee"))
    else:
        acc = tl.dot(p, v_tile, acc * decay[:, None], input_precision="ieee")
    return top, l, acc


@triton.jit(
    do_not_specialize=[
        "heads_q", "ratio", "seq_q", "seq_k", "row_blocks", "lse_rows", "left", "right",
    ]
)  # fmt: skip
def plain_attention_kernel(
    q, k, v, o, lse, mask, bits, lists, sinks, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_od,
    stride_mb, stride_mh, stride_mq, stride_mk, planes_b, planes_h,
    heads_q, ratio, seq_q, seq_k, row_blocks, lse_rows, left, right, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FLUSH: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PACKED: tl.constexpr,
    LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FlashAttention-2 on tensors read in place; `scale` and `softcap` have log2 e folded in."""
    if MASK == 2:
        block, bh = head_group(tl.program_id(0), row_blocks, RIGHT, GROUP)
    else:
        block, bh = program_block(tl.program_id(0), row_blocks, RIGHT)
    b, h = bh // heads_q, bh % heads_q
    first_row = block * BM
    q_first, seq_q = sequence(cu_seqlens_q, b, seq_q, PACKED)
    k_first, seq_k = sequence(cu_seqlens_k, b, seq_k, PACKED)
    if PACKED:
        if first_row >= seq_q:
            return
        q += q_first * stride_qs + h * stride_qh
        k += k_first * stride_ks + (h // ratio) * stride_kh
        v += k_first * stride_vs + (h // ratio) * stride_vh
        o += q_first * stride_os + h * stride_oh
        lse_row = h * lse_rows + q_first
    else:
        q += b * stride_qb + h * stride_qh
        k += b * stride_kb + (h // ratio) * stride_kh
        v += b * stride_vb + (h // ratio) * stride_vh
        o += b * stride_ob + h * stride_oh
        lse_row = bh * lse_rows
    if mask is not None:
        mask += b * (stride_mb // UNIT * UNIT) + h * (stride_mh // UNIT * UNIT)
    rows = first_row + tl.arange(0, BM)
    d = tl.arange(0, DP)
    at = q + rows.to(tl.int64)[:, None] * stride_qs + d.to(tl.int64)[None, :] * stride_qd
    q_tile = tl.load(at, mask=(rows < seq_q)[:, None] & (d < D)[None, :], other=0.0)
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
                    k, v, stride_ks, stride_kd, stride_vs, stride_vd, mask, bits, stride_mq,
                    stride_mk, j, q_tile, scale, softcap, m, l, acc, first_row, seq_q, seq_k, left,
                    right, D, DP, BM, BN, FLUSH, LEFT, RIGHT, MASK, UNIT, SOFTCAP, False, kind,
                )  # fmt: skip
                j = tl.load(at + i + 1)
    else:
        begin, inner, outer, end = key_blocks(
            first_row, seq_q, seq_k, left, right, BM, BN, LEFT, RIGHT
        )
        if LEFT:
            for j in tl.range(begin, inner, num_stages=1):
                m, l, acc = _step(
                    k, v, stride_ks, stride_kd, stride_vs, stride_vd, mask, bits, stride_mq,
                    stride_mk, j, q_tile, scale, softcap, m, l, acc, first_row, seq_q, seq_k, left,
                    right, D, DP, BM, BN, FLUSH, LEFT, RIGHT, MASK, UNIT, SOFTCAP, True, 0,
                )  # fmt: skip
        for j in tl.range(inner, outer, num_stages=STAGES):
            m, l, acc = _step(
                k, v, stride_ks, stride_kd, stride_vs, stride_vd, mask, bits, stride_mq, stride_mk,
                j, q_tile, scale, softcap, m, l, acc, first_row, seq_q, seq_k, left, right, D, DP,
                BM, BN, FLUSH, LEFT, RIGHT, MASK, UNIT, SOFTCAP, False, 0,
            )  # fmt: skip
        for j in tl.range(outer, end, num_stages=1):
            m, l, acc = _step(
                k, v, stride_ks, stride_kd, stride_vs, stride_vd, mask, bits, stride_mq, stride_mk,
                j, q_tile, scale, softcap, m, l, acc, first_row, seq_q, seq_k, left, right, D, DP,
                BM, BN, FLUSH, LEFT, RIGHT, MASK, UNIT, SOFTCAP, True, 0,
            )  # fmt: skip
    alive = l != 0.0  # NaN is alive: it has to be seen
    if SINKS:
        sink = tl.zeros([BM], tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2E
        m, l, decay = with_sink(m, l, sink, 0.0)
        acc = acc * decay[:, None]
        norm = l
    else:
        norm = tl.where(alive, l, 1.0)
    out = tl.where(alive[:, None], acc / norm[:, None], 0.0)
    store_rows(o, out, rows, d, seq_q, stride_os, stride_od, D)
    if LSE:
        value = (tl.log2(norm) + m) * LN2
        if not SINKS:
            value = tl.where(alive, value, float("-inf"))
        tl.store(lse + lse_row + rows, value, mask=rows < seq_q)
