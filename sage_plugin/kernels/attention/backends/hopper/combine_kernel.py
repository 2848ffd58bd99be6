"""The Triton kernel that makes outputs of what pieces of a tile's keys left; see `tiles`."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def pieces_of(tile, blocks, share):
    """Numbers of the first and the last piece of a tile, one of those that are cut into shares."""
    return tile * blocks // share + tile, ((tile + 1) * blocks - 1) // share + tile


@triton.jit(
    do_not_specialize=["heads_q", "seq_q", "q_rows", "row_blocks", "whole", "blocks", "share",
                       "lse_rows"]
)  # fmt: skip
def combine_kernel(
    o, lse, shift, piece_outs, piece_sums, strides, heads_q, seq_q, q_rows, row_blocks, whole,
    blocks, share, lse_rows, CONFIG: tl.constexpr,
):  # fmt: skip
    """Some rows of one tile: the mean of its pieces' outputs, weighted by their sums."""
    HEAD_DIM: tl.constexpr = CONFIG.PADDED_DIM
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    ROWS: tl.constexpr = CONFIG.ROWS
    stride_ob, stride_oh, stride_os, stride_od = strides
    # Which rows of which tile
    at = tl.program_id(0) // (BLOCK_M // ROWS)
    offs_m = tl.program_id(0) % (BLOCK_M // ROWS) * ROWS + tl.arange(0, ROWS)
    tile = whole + at
    bh = tile // row_blocks
    rows = tile % row_blocks * BLOCK_M + offs_m
    live = rows < seq_q
    offs_d = tl.arange(0, HEAD_DIM)
    first, last = pieces_of(at, blocks, share)
    # The largest sum of a row, so that weights are at most 1
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    for piece in range(first, last + 1):
        m_i = tl.maximum(m_i, tl.load(piece_sums + piece * BLOCK_M + offs_m))  # (ROWS,)
    base = tl.where(m_i == float("-inf"), 0.0, m_i)
    # The weighted mean
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for piece in range(first, last + 1):
        weight = tl.exp2(tl.load(piece_sums + piece * BLOCK_M + offs_m) - base)  # (ROWS,)
        row = (piece * BLOCK_M + offs_m).to(tl.int64) * HEAD_DIM
        # (ROWS, HEAD_DIM)
        acc += weight[:, None] * tl.load(piece_outs + row[:, None] + offs_d[None, :])
        l_i += weight
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    to = o + (bh // heads_q).to(tl.int64) * stride_ob + (bh % heads_q).to(tl.int64) * stride_oh
    to += rows.to(tl.int64)[:, None] * stride_os + offs_d.to(tl.int64)[None, :] * stride_od
    stored = live[:, None] & (offs_d < CONFIG.HEAD_DIM)[None, :]
    tl.store(to, acc.to(o.dtype.element_ty), mask=stored)
    if CONFIG.LSE:
        value = tl.log2(l_i) + base
        if CONFIG.SHIFT:
            value += tl.load(shift + bh.to(tl.int64) * q_rows + rows, mask=live, other=0.0)
        value = tl.where(l_i == 0.0, float("-inf"), value * LN2)
        tl.store(lse + bh.to(tl.int64) * lse_rows + rows, value, mask=live)
