"""The portable attention kernel on quantised operands.

`key_term` says what a key adds to every score: 0, its bias, -inf where nobody sees it, NaN where
its row of K or V was not finite. Steps that compare positions or add a mask read it; the others
find NaN in the scale of a block that holds such a key, which all of their rows see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sage_plugin.kernels.attention.backends.triton.loop_kernels import (
    CallSizes,
    LoopConfig,
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
    add_row,
    added_tile,
    head_rows,
    hide,
    hide_finite,
    offset_of_rows,
    scratch_row,
    seen_bytes,
    soft_cap,
    store_rows,
    two_level,
    visible_keys,
    with_sink,
)

SMALLEST = tl.constexpr(1e-37)
"""Added to a scale, so that -inf times it is -inf."""


@dataclass(frozen=True)
class QuantizedConfig(LoopConfig):
    """What the kernel is compiled for besides.

    Attributes:
        QK8: whether Q and K are INT8; PV8 whether V is FP8.
        P_TYPE: type of P.
        OFFSET: log2 of what P is multiplied by.
        TMA: whether Q, K and V come as descriptors.
        SHIFT: whether smoothing took something from the scores.
    """

    QK8: bool
    PV8: bool
    P_TYPE: Any
    OFFSET: float
    TMA: bool
    SHIFT: bool


class OperandScales(NamedTuple):
    """What turns quantised operands back: see `QuantizedOperands`."""

    q_scale: Any
    k_scale: Any
    k_scale_finite: Any
    key_term: Any
    v_scale: Any
    v_mean: Any
    v_residual: Any
    v_unit: Any
    shift: Any


class QuantizedTensors(NamedTuple):
    """What a launch points to besides Q, K and V, which may be descriptors."""

    o: Any
    lse: Any
    scales: Any
    mask: Any
    sinks: Any
    cu_seqlens: Any


class QuantizedStrides(NamedTuple):
    """Strides of the output and the mask, four of each."""

    o: Any
    mask: Any


class QuantizedHead(NamedTuple):
    """What a step reads of a head of keys, in a kernel: where its rows begin, and their scales."""

    k: Any
    v: Any
    scales: Any
    row_scale: Any
    row_shift: Any
    softcap: Any
    kv_row: Any
    v_row: Any
    v_column: Any
    k_rows: Any


@triton.jit
def _step(
    head, q, mask, here, window, j, m_i, l_i, acc, CONFIG: tl.constexpr, EDGE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One key block: scores, online softmax, P V."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    OFFSET: tl.constexpr = CONFIG.OFFSET
    TERMS: tl.constexpr = EDGE or CONFIG.MASK == 1 or CONFIG.MASK == 3
    kv_row, scales = head.kv_row, head.scales
    block = kv_row // BLOCK_N + j
    offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    # K: (BLOCK_N, BLOCK_D)
    if CONFIG.TMA:
        k_tile = head.k.load([(kv_row + j * BLOCK_N).to(tl.int32), 0])
    else:
        k_tile = tl.load(
            head.k + (kv_row + offs_n)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        )
    # scores: (BLOCK_M, BLOCK_N), in units of the scales of their row and block
    if CONFIG.QK8:
        qk = tl.dot(q, tl.trans(k_tile), out_dtype=tl.int32)
    else:
        qk = tl.dot(q, tl.trans(k_tile))
    whole_scale = tl.load(scales.k_scale + block)
    offset = OFFSET
    if TILE > 0:
        seen = seen_bytes(mask.bits, j, BLOCK_M, BLOCK_N)
        term = scales.key_term + kv_row + j * BLOCK_N
        offset = offset_of_rows(whole_scale, term, mask.bits, j, OFFSET, BLOCK_M, BLOCK_N)
    if TERMS or TILE > 0:
        scale = head.row_scale * tl.load(scales.k_scale_finite + block)
    else:
        scale = head.row_scale * whole_scale
    # mask and online softmax: with terms for keys, with hidden keys only, or with neither
    if TERMS or CONFIG.SOFTCAP or TILE == 2:
        x = qk.to(tl.float32) * scale[:, None]
        if CONFIG.SOFTCAP:
            x = soft_cap(x + head.row_shift[:, None], head.softcap)
        if TERMS:
            x += tl.load(scales.key_term + kv_row + offs_n)[None, :]  # (BLOCK_N)
        if CONFIG.MASK == 3:
            x = add_row(x, mask.at, offs_n, here.seq_k, mask.stride_n)
        if TILE == 2:
            added = added_tile(
                mask.at, here.first_row, j, here.seq_q, here.seq_k, mask.stride_m,
                mask.stride_n, BLOCK_M, BLOCK_N, CONFIG.UNIT,
            )  # fmt: skip
            x += added.to(tl.float32) * LOG2E
        if TILE > 0:
            x = hide(x, seen, BLOCK_N)
        if EDGE:
            offs_m = here.first_row + tl.arange(0, BLOCK_M)
            inside = visible_keys(
                offs_m, offs_n, here.seq_q, here.seq_k, window.left, window.right, CONFIG.LEFT,
                CONFIG.RIGHT,
            )  # fmt: skip
            x = tl.where(inside, x, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(x, 1))
        p = tl.math.exp2(x - (m_new - offset)[:, None])
    elif TILE == 1:
        x = hide_finite(qk.to(tl.float32), seen, BLOCK_N)
        scale += SMALLEST
        m_new = tl.maximum(m_i, tl.max(x, 1) * scale)
        p = tl.math.exp2(x * scale[:, None] - (m_new - offset)[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(qk, 1).to(tl.float32) * scale)
        p = tl.math.exp2(qk.to(tl.float32) * scale[:, None] - (m_new - OFFSET)[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    # V: (BLOCK_N, BLOCK_D), in FP8 stored as (BLOCK_D, BLOCK_N) with its keys in the order of P's
    p8 = p.to(CONFIG.P_TYPE)
    if CONFIG.PV8:
        p8 = p8.reshape([BLOCK_M, BLOCK_N // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4)
        p8 = p8.reshape([BLOCK_M, BLOCK_N])
        if CONFIG.TMA:
            v_tile = head.v.load(
                [head.v_row.to(tl.int32), (head.v_column + j * BLOCK_N).to(tl.int32)]
            )
        else:
            n = head.v_column + offs_n
            v_tile = tl.load(
                head.v + (head.v_row + tl.arange(0, BLOCK_D))[:, None] * head.k_rows + n[None, :]
            )
        v_tile = tl.trans(v_tile)
    else:
        if CONFIG.TMA:
            v_tile = head.v.load([(kv_row + j * BLOCK_N).to(tl.int32), 0])
        else:
            v_tile = tl.load(
                head.v + (kv_row + offs_n)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            )
    # P V
    if CONFIG.FLUSH == 1:
        acc = two_level(acc, alpha, tl.dot(p8, v_tile))
    else:
        acc = tl.dot(p8, v_tile, acc * alpha[:, None])
    return m_new, l_i, acc


@triton.jit(
    do_not_specialize=[
        "heads_q", "ratio", "seq_q", "seq_k", "q_rows", "row_blocks", "lse_rows", "left", "right",
    ]
)  # fmt: skip
def quantized_attention_kernel(
    q, k, v, tensors, strides, planes, heads_q, ratio, seq_q, seq_k, q_rows, k_rows, row_blocks,
    lse_rows, left, right, softcap, CONFIG: tl.constexpr,
):  # fmt: skip
    """Attention on quantised operands; q, k, v are pointers, or TMA descriptors when TMA is set."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    OFFSET: tl.constexpr = CONFIG.OFFSET
    PACKED: tl.constexpr = CONFIG.PACKED
    SOFTCAP: tl.constexpr = CONFIG.SOFTCAP
    TRUE_SCORES: tl.constexpr = CONFIG.SOFTCAP or CONFIG.SINKS or CONFIG.LSE
    sizes = CallSizes(heads_q, ratio, seq_q, seq_k)
    window = SlidingWindow(left, right)
    scales = tensors.scales
    cu_seqlens = tensors.cu_seqlens
    mask = tensors.mask
    block, bh = block_and_head(row_blocks, CONFIG)
    b, h = bh // heads_q, bh % heads_q
    heads_k = heads_q // ratio
    kv_head = b * heads_k + h // ratio
    here = query_block(b, h, bh, block, row_blocks, sizes, cu_seqlens, CONFIG)
    q_first, k_first = here.q_first, here.k_first
    if PACKED:
        if here.first_row >= here.seq_q:
            return
    offs_m = here.first_row + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q_row = scratch_row(q_first, b, h, heads_q, q_rows, BLOCK_M, PACKED)
    kv_row = scratch_row(k_first, b, h // ratio, heads_k, k_rows, BLOCK_N, PACKED)
    if PACKED:
        v_row = (h // ratio) * BLOCK_D
        v_column = (k_first // BLOCK_N + b) * BLOCK_N
    else:
        v_row = kv_head * BLOCK_D
        v_column = tl.full([], 0, tl.int32)
    # Q: (BLOCK_M, BLOCK_D); its scales, and what smoothing K took from its scores: (BLOCK_M)
    if CONFIG.TMA:
        q_tile = q.load([(q_row + here.first_row).to(tl.int32), 0])
    else:
        q_tile = tl.load(q + (q_row + offs_m)[:, None] * BLOCK_D + offs_d[None, :])
    row_scale = tl.load(scales.q_scale + q_row + offs_m)
    row_shift = row_scale
    if CONFIG.SHIFT and TRUE_SCORES:
        row_shift = tl.load(scales.shift + q_row + offs_m)
    elif TRUE_SCORES:
        row_shift = tl.zeros([BLOCK_M], tl.float32)
    mask_at = mask.at
    if mask_at is not None:
        mask_at = plane_of(mask_at, strides.mask, here, CONFIG.UNIT)
    plane = MaskPlane(mask_at, mask.bits, mask.lists, strides.mask.row, strides.mask.channel)
    # the keys that these rows see
    head = QuantizedHead(
        k, v, scales, row_scale, row_shift, softcap, kv_row, v_row, v_column, k_rows
    )
    m_i, l_i, acc = fold_keys(head, q_tile, plane, planes, here, window, _step, CONFIG)
    # output: (BLOCK_M, BLOCK_D), with the scale and mean of each channel of V: (BLOCK_D)
    mean = tl.load(scales.v_mean + kv_head * BLOCK_D + offs_d)
    if CONFIG.PV8:
        gained = tl.load(scales.v_residual + kv_head * BLOCK_D + offs_d).to(tl.float32)
        mean -= gained * tl.load(scales.v_unit + kv_head * BLOCK_D + offs_d)
    mean = mean[None, :]
    scale = tl.load(scales.v_scale + kv_head * BLOCK_D + offs_d)[None, :]
    alive = l_i != 0.0  # NaN is alive: it has to be seen
    if CONFIG.SINKS:
        sink = tl.load(tensors.sinks + h).to(tl.float32) * LOG2E
        before = l_i
        if SOFTCAP:
            m_i, l_i, alpha = with_sink(m_i, l_i, tl.zeros([BLOCK_M], tl.float32) + sink, OFFSET)
        else:
            m_i, l_i, alpha = with_sink(m_i, l_i, sink - row_shift, OFFSET)
        out = acc * (alpha / l_i)[:, None] * scale + mean * (before * alpha / l_i)[:, None]
        norm = l_i
    else:
        norm = tl.where(alive, l_i, 1.0)
        out = acc / norm[:, None] * scale + mean
    out = tl.where(alive[:, None], out, 0.0)
    o = head_rows(tensors.o, strides.o, q_first, b, h, 1, PACKED)
    store_rows(o, out, offs_m, offs_d, here.seq_q, strides.o, CONFIG.HEAD_DIM)
    if CONFIG.LSE:
        value = tl.log2(norm) - OFFSET + m_i
        if CONFIG.SHIFT and not SOFTCAP:
            value += row_shift
        lse = tensors.lse + lse_begin(here, lse_rows, PACKED)
        store_lse(lse, value, alive, offs_m, here.seq_q, CONFIG.SINKS)
