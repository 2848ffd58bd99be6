"""The portable attention kernel on tensors as they are: FlashAttention-2, read in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sage_plugin.kernels.attention.backends.triton.loop_kernels import (
    CallSizes,
    MaskPlane,
    block_and_head,
    fold_keys,
    lse_begin,
    plane_of,
    query_block,
    store_lse,
)
from sage_plugin.kernels.primitives import (
    LOG2E,
    SlidingWindow,
    StridedTensor,
    add_row,
    added_tile,
    head_rows,
    hide,
    seen_bytes,
    soft_cap,
    store_rows,
    two_level,
    visible_keys,
    with_sink,
)


class PlainTensors(NamedTuple):
    """What a launch points to."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    mask: Any
    sinks: Any
    cu_seqlens: Any


class PlainStrides(NamedTuple):
    """Strides of the tensors of a launch, four of each."""

    q: Any
    k: Any
    v: Any
    o: Any
    mask: Any


class PlainHead(NamedTuple):
    """What a step reads of a head of keys, in a kernel."""

    k: Any
    v: Any
    scale: Any
    softcap: Any


@triton.jit
def _step(
    head, q, mask, here, window, j, m_i, l_i, acc, CONFIG: tl.constexpr, EDGE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One key block; where a key can be hidden, what is not finite in V is kept out of P V."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    HIDES: tl.constexpr = EDGE or TILE > 0 or CONFIG.MASK == 3
    k, v = head.k, head.v
    if TILE > 0:
        seen = seen_bytes(mask.bits, j, BLOCK_M, BLOCK_N)
    # K and V, both (BLOCK_N, BLOCK_D)
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    n64 = offs_n.to(tl.int64)
    d64 = offs_d.to(tl.int64)
    k_at = k.at + n64[:, None] * k.strides.row + d64[None, :] * k.strides.channel
    v_at = v.at + n64[:, None] * v.strides.row + d64[None, :] * v.strides.channel
    if EDGE or TILE > 0 or CONFIG.HEAD_DIM != CONFIG.BLOCK_D:
        live = (offs_n < here.seq_k)[:, None] & (offs_d < CONFIG.HEAD_DIM)[None, :]
        k_tile = tl.load(k_at, mask=live, other=0.0)
        v_tile = tl.load(v_at, mask=live, other=0.0)
    else:
        k_tile = tl.load(k_at)
        v_tile = tl.load(v_at)
    # scores: (BLOCK_M, BLOCK_N), in log2 units
    if q.dtype == k_tile.dtype:
        qk = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * head.scale
    else:
        wide = tl.trans(k_tile.to(tl.float32))
        qk = tl.dot(q.to(tl.float32), wide, input_precision="ieee") * head.scale
    if CONFIG.SOFTCAP:
        qk = soft_cap(qk, head.softcap)
    # mask: what is added, then what is hidden
    if HIDES:
        finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
        bad = tl.max(tl.where(finite, 0, 1), 1) > 0
        v_tile = tl.where(finite, v_tile, 0.0)
        qk += tl.where(bad, float("nan"), 0.0)[None, :]
    if CONFIG.MASK == 3:
        qk = add_row(qk, mask.at, offs_n, here.seq_k, mask.stride_n)
    if TILE == 2:
        added = added_tile(
            mask.at, here.first_row, j, here.seq_q, here.seq_k, mask.stride_m, mask.stride_n,
            BLOCK_M, BLOCK_N, CONFIG.UNIT,
        )  # fmt: skip
        qk += added.to(tl.float32) * LOG2E
    if TILE > 0:
        qk = hide(qk, seen, BLOCK_N)
    if EDGE:
        offs_m = here.first_row + tl.arange(0, BLOCK_M)
        seen = visible_keys(
            offs_m, offs_n, here.seq_q, here.seq_k, window.left, window.right, CONFIG.LEFT,
            CONFIG.RIGHT,
        )  # fmt: skip
        qk = tl.where(seen, qk, float("-inf"))
    # online softmax
    m_new = tl.maximum(m_i, tl.max(qk, 1))
    p = tl.math.exp2(qk - m_new[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    # P V
    p = p.to(v_tile.dtype)
    if CONFIG.FLUSH == 1:
        acc = two_level(acc, alpha, tl.dot(p, v_tile, input_precision="ieee"))
    else:
        acc = tl.dot(p, v_tile, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


@triton.jit(
    do_not_specialize=[
        "heads_q", "ratio", "seq_q", "seq_k", "row_blocks", "lse_rows", "left", "right",
    ]
)  # fmt: skip
def plain_attention_kernel(
    tensors, strides, planes, heads_q, ratio, seq_q, seq_k, row_blocks, lse_rows, left, right,
    scale, softcap, CONFIG: tl.constexpr,
):  # fmt: skip
    """FlashAttention-2 on tensors read in place; `scale` and `softcap` have log2 e folded in."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    PACKED: tl.constexpr = CONFIG.PACKED
    sizes = CallSizes(heads_q, ratio, seq_q, seq_k)
    window = SlidingWindow(left, right)
    cu_seqlens = tensors.cu_seqlens
    mask = tensors.mask
    block, bh = block_and_head(row_blocks, CONFIG)
    b, h = bh // heads_q, bh % heads_q
    here = query_block(b, h, bh, block, row_blocks, sizes, cu_seqlens, CONFIG)
    q_first, k_first = here.q_first, here.k_first
    if PACKED:
        if here.first_row >= here.seq_q:
            return
    q = head_rows(tensors.q, strides.q, q_first, b, h, 1, PACKED)
    k = head_rows(tensors.k, strides.k, k_first, b, h, ratio, PACKED)
    v = head_rows(tensors.v, strides.v, k_first, b, h, ratio, PACKED)
    o = head_rows(tensors.o, strides.o, q_first, b, h, 1, PACKED)
    lse_row = lse_begin(here, lse_rows, PACKED)
    mask_at = mask.at
    if mask_at is not None:
        mask_at = plane_of(mask_at, strides.mask, here, CONFIG.UNIT)
    plane = MaskPlane(mask_at, mask.bits, mask.lists, strides.mask.row, strides.mask.channel)
    # Q: (BLOCK_M, BLOCK_D)
    offs_m = here.first_row + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    q += offs_m.to(tl.int64)[:, None] * strides.q.row
    q += offs_d.to(tl.int64)[None, :] * strides.q.channel
    live = (offs_m < here.seq_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_tile = tl.load(q, mask=live, other=0.0)
    # the keys that these rows see
    head = PlainHead(StridedTensor(k, strides.k), StridedTensor(v, strides.v), scale, softcap)
    m_i, l_i, acc = fold_keys(head, q_tile, plane, planes, here, window, _step, CONFIG)
    # output: (BLOCK_M, BLOCK_D), and the log-sum-exp
    alive = l_i != 0.0  # NaN is alive: it has to be seen
    if CONFIG.SINKS:
        sink = tl.zeros([BLOCK_M], tl.float32) + tl.load(tensors.sinks + h).to(tl.float32) * LOG2E
        m_i, l_i, alpha = with_sink(m_i, l_i, sink, 0.0)
        acc = acc * alpha[:, None]
        norm = l_i
    else:
        norm = tl.where(alive, l_i, 1.0)
    out = tl.where(alive[:, None], acc / norm[:, None], 0.0)
    store_rows(o, out, offs_m, offs_d, here.seq_q, strides.o, HEAD_DIM)
    if CONFIG.LSE:
        value = tl.log2(norm) + m_i
        store_lse(tensors.lse + lse_row, value, alive, offs_m, here.seq_q, CONFIG.SINKS)
