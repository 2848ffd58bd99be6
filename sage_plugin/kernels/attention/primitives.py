"""Triton code that the portable attention kernels share.

Grid: one program a block of query rows of one head, folded into the first grid axis (B*H may pass
65,535). Key blocks that every row of the program sees run without masks; then the diagonal and the
tail run with them. Scores live in log2 units; a row's maximum starts at a finite value so that rows
without a visible key end with an empty sum, and become 0 with LSE -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_range(first_row, seq_q, seq_k, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """How many key blocks need no mask, and how many there are to visit at all."""
    if CAUSAL:
        diagonal = seq_k - seq_q
        visible = tl.maximum(tl.minimum(seq_k, first_row + BM + diagonal), 0)
        everywhere = tl.maximum(tl.minimum(seq_k, first_row + 1 + diagonal), 0)
        return everywhere // BN, tl.cdiv(visible, BN)
    return seq_k // BN, tl.cdiv(seq_k, BN)


@triton.jit
def visible_keys(rows, first_key, seq_q, seq_k, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """`(1 or BM, BN)` mask of the keys of a block that each row sees."""
    keys = first_key + tl.arange(0, BN)
    seen = (keys < seq_k)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= (rows + (seq_k - seq_q))[:, None])
    return seen


@triton.jit
def program_block(pid, row_blocks, CAUSAL: tl.constexpr):
    """Row block and head of a program; long causal rows first, so that the last wave is short."""
    block = pid % row_blocks
    if CAUSAL:
        block = row_blocks - 1 - block
    return block, (pid // row_blocks).to(tl.int64)


@triton.jit
def store_rows(
    o, tile, rows, d, bh, heads, seq_q, stride_b, stride_h, stride_s, stride_d, D: tl.constexpr
):
    """Store a `(BM, DP)` tile to one head of a strided output."""
    at = o + (bh // heads) * stride_b + (bh % heads) * stride_h
    at = at + rows.to(tl.int64)[:, None] * stride_s + d.to(tl.int64)[None, :] * stride_d
    tl.store(at, tile.to(o.dtype.element_ty), mask=(rows < seq_q)[:, None] & (d < D)[None, :])


@triton.jit
def two_level(acc, decay, partial):
    """Rescale the fp32 sum and add a block's partial product outside of the tensor core.

    Tensor cores truncate while they accumulate; an explicit fma keeps the compiler from folding the
    addition back into the product.
    """
    return tl.math.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), partial)


@triton.jit
def _quantised_step(
    k, v, k_scale, j, q, q_scale, m, l, acc, rows, seq_q, seq_k, kv_row, kv_head, k_rows,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QK8: tl.constexpr, PV8: tl.constexpr,
    P_TYPE: tl.constexpr, OFFSET: tl.constexpr, FLUSH: tl.constexpr, TMA: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key block of a quantised kernel: scores, online softmax, P V."""
    if TMA:
        k_tile = k.load([(kv_row + j * BN).to(tl.int32), 0])
    else:
        n = j * BN + tl.arange(0, BN)
        k_tile = tl.load(k + (kv_row + n)[:, None] * DP + tl.arange(0, DP)[None, :])
    if QK8:
        s = tl.dot(q, tl.trans(k_tile), out_dtype=tl.int32)
    else:
        s = tl.dot(q, tl.trans(k_tile))
    scale = q_scale * tl.load(k_scale + j)
    if MASKED:
        seen = visible_keys(rows, j * BN, seq_q, seq_k, BN, CAUSAL)
        x = tl.where(seen, s.to(tl.float32) * scale[:, None], float("-inf"))
        top = tl.maximum(m, tl.max(x, 1))
        p = tl.math.exp2(x - (top - OFFSET)[:, None])
    else:
        top = tl.maximum(m, tl.max(s, 1).to(tl.float32) * scale)
        p = tl.math.exp2(s.to(tl.float32) * scale[:, None] - (top - OFFSET)[:, None])
    decay = tl.math.exp2(m - top)
    l = l * decay + tl.sum(p, 1)
    pv = p.to(P_TYPE)
    if PV8:
        pv = pv.reshape([BM, BN // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([BM, BN])
        if TMA:
            v_tile = v.load([(kv_head * DP).to(tl.int32), j * BN])
        else:
            n = j * BN + tl.arange(0, BN)
            v_tile = tl.load(v + (kv_head * DP + tl.arange(0, DP))[:, None] * k_rows + n[None, :])
        v_tile = tl.trans(v_tile)
    else:
        if TMA:
            v_tile = v.load([(kv_row + j * BN).to(tl.int32), 0])
        else:
            n = j * BN + tl.arange(0, BN)
            v_tile = tl.load(v + (kv_row + n)[:, None] * DP + tl.arange(0, DP)[None, :])
    if FLUSH == 1:
        acc = two_level(acc, decay, tl.dot(pv, v_tile))
    else:
        acc = tl.dot(pv, v_tile, acc * decay[:, None])
    return top, l, acc


@triton.jit(
    do_not_specialize=["heads_q", "ratio", "seq_q", "seq_k", "q_rows", "row_blocks", "key_blocks"]
)
def quantised_attention_kernel(
    q, k, v, o, lse, q_scale, k_scale, v_scale, v_mean, shift,
    stride_ob, stride_oh, stride_os, stride_od,
    heads_q, ratio, seq_q, seq_k, q_rows, k_rows, row_blocks, key_blocks,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QK8: tl.constexpr,
    PV8: tl.constexpr, P_TYPE: tl.constexpr, OFFSET: tl.constexpr, FLUSH: tl.constexpr,
    TMA: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention on quantised operands; q, k, v are pointers, or TMA descriptors when TMA is set."""
    block, bh = program_block(tl.program_id(0), row_blocks, CAUSAL)
    kv_head = (bh // heads_q) * (heads_q // ratio) + (bh % heads_q) // ratio
    first_row = block * BM
    rows = first_row + tl.arange(0, BM)
    d = tl.arange(0, DP)
    if TMA:
        q_tile = q.load([(bh * q_rows + first_row).to(tl.int32), 0])
    else:
        q_tile = tl.load(q + (bh * q_rows + rows)[:, None] * DP + d[None, :])
    row_scale = tl.load(q_scale + bh * q_rows + rows)
    k_scale += kv_head * key_blocks
    kv_row = kv_head * k_rows
    m = tl.full([BM], -1e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    plain, total = block_range(first_row, seq_q, seq_k, BM, BN, CAUSAL)
    for j in tl.range(0, plain, num_stages=STAGES):
        m, l, acc = _quantised_step(
            k, v, k_scale, j, q_tile, row_scale, m, l, acc, rows, seq_q, seq_k,
            kv_row, kv_head, k_rows,
            DP, BM, BN, QK8, PV8, P_TYPE, OFFSET, FLUSH, TMA, CAUSAL, False,
        )  # fmt: skip
    for j in tl.range(plain, total, num_stages=1):
        m, l, acc = _quantised_step(
            k, v, k_scale, j, q_tile, row_scale, m, l, acc, rows, seq_q, seq_k,
            kv_row, kv_head, k_rows,
            DP, BM, BN, QK8, PV8, P_TYPE, OFFSET, FLUSH, TMA, CAUSAL, True,
        )  # fmt: skip
    alive = l != 0.0  # NaN is alive: it has to be seen
    out = acc / tl.where(alive, l, 1.0)[:, None] * tl.load(v_scale + kv_head * DP + d)[None, :]
    out = tl.where(alive[:, None], out + tl.load(v_mean + kv_head * DP + d)[None, :], 0.0)
    store_rows(o, out, rows, d, bh, heads_q, seq_q, stride_ob, stride_oh, stride_os, stride_od, D)
    if LSE:
        value = tl.log2(tl.where(alive, l, 1.0)) - OFFSET + m
        if SHIFT:
            value += tl.load(shift + bh * q_rows + rows)
        value = tl.where(alive, value * 0.6931471805599453, float("-inf"))
        tl.store(lse + bh * seq_q + rows, value, mask=rows < seq_q)


@triton.jit
def _plain_step(
    k, v, stride_ks, stride_kd, stride_vs, stride_vd, j, q, scale, m, l, acc, rows, seq_q, seq_k,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, FLUSH: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One key block of unquantised attention."""
    d = tl.arange(0, DP)
    n = j * BN + tl.arange(0, BN)
    n64 = n.to(tl.int64)
    d64 = d.to(tl.int64)
    k_at = k + n64[:, None] * stride_ks + d64[None, :] * stride_kd
    v_at = v + n64[:, None] * stride_vs + d64[None, :] * stride_vd
    if MASKED or D != DP:
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
    if MASKED:
        s = tl.where(visible_keys(rows, j * BN, seq_q, seq_k, BN, CAUSAL), s, float("-inf"))
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


@triton.jit(do_not_specialize=["heads_q", "ratio", "seq_q", "seq_k", "row_blocks"])
def plain_attention_kernel(
    q, k, v, o, lse,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_od,
    heads_q, ratio, seq_q, seq_k, row_blocks, scale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FLUSH: tl.constexpr,
    CAUSAL: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FlashAttention-2 on tensors read in place; `scale` has log2 e folded in."""
    block, bh = program_block(tl.program_id(0), row_blocks, CAUSAL)
    b, h = bh // heads_q, bh % heads_q
    first_row = block * BM
    rows = first_row + tl.arange(0, BM)
    d = tl.arange(0, DP)
    at = q + b * stride_qb + h * stride_qh
    at = at + rows.to(tl.int64)[:, None] * stride_qs + d.to(tl.int64)[None, :] * stride_qd
    q_tile = tl.load(at, mask=(rows < seq_q)[:, None] & (d < D)[None, :], other=0.0)
    k += b * stride_kb + (h // ratio) * stride_kh
    v += b * stride_vb + (h // ratio) * stride_vh
    m = tl.full([BM], -1e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    plain, total = block_range(first_row, seq_q, seq_k, BM, BN, CAUSAL)
    for j in tl.range(0, plain, num_stages=STAGES):
        m, l, acc = _plain_step(
            k, v, stride_ks, stride_kd, stride_vs, stride_vd, j, q_tile, scale, m, l, acc,
            rows, seq_q, seq_k, D, DP, BN, FLUSH, CAUSAL, False,
        )  # fmt: skip
    for j in tl.range(plain, total, num_stages=1):
        m, l, acc = _plain_step(
            k, v, stride_ks, stride_kd, stride_vs, stride_vd, j, q_tile, scale, m, l, acc,
            rows, seq_q, seq_k, D, DP, BN, FLUSH, CAUSAL, True,
        )  # fmt: skip
    alive = l != 0.0  # NaN is alive: it has to be seen
    out = tl.where(alive[:, None], acc / tl.where(alive, l, 1.0)[:, None], 0.0)
    store_rows(o, out, rows, d, bh, heads_q, seq_q, stride_ob, stride_oh, stride_os, stride_od, D)
    if LSE:
        value = (tl.log2(tl.where(alive, l, 1.0)) + m) * 0.6931471805599453
        tl.store(lse + bh * seq_q + rows, tl.where(alive, value, float("-inf")), mask=rows < seq_q)
