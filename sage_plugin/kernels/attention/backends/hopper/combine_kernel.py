"""The Triton kernel that makes outputs of what pieces of a tile's keys left; see `hopper_tiles`."""

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
def merge_kernel(
    o, lse, shift, piece_outs, piece_sums, stride_ob, stride_oh, stride_os, stride_od, heads_q,
    seq_q, q_rows, row_blocks, whole, blocks, share, lse_rows,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, LSE: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Some rows of one tile: the mean of its pieces' outputs, weighted by their sums."""
    at = tl.program_id(0) // (BM // ROWS)
    inside = tl.program_id(0) % (BM // ROWS) * ROWS + tl.arange(0, ROWS)
    tile = whole + at
    bh = tile // row_blocks
    rows = tile % row_blocks * BM + inside
    live = rows < seq_q
    d = tl.arange(0, DP)
    first, last = pieces_of(at, blocks, share)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for piece in range(first, last + 1):
        top = tl.maximum(top, tl.load(piece_sums + piece * BM + inside))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DP], tl.float32)
    for piece in range(first, last + 1):
        weight = tl.exp2(tl.load(piece_sums + piece * BM + inside) - base)
        row = (piece * BM + inside).to(tl.int64) * DP
        out += weight[:, None] * tl.load(piece_outs + row[:, None] + d[None, :])
        total += weight
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    to = o + (bh // heads_q).to(tl.int64) * stride_ob + (bh % heads_q).to(tl.int64) * stride_oh
    to += rows.to(tl.int64)[:, None] * stride_os + d.to(tl.int64)[None, :] * stride_od
    tl.store(to, out.to(o.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    if LSE:
        value = tl.log2(total) + base
        if SHIFT:
            value += tl.load(shift + bh.to(tl.int64) * q_rows + rows, mask=live, other=0.0)
        value = tl.where(total == 0.0, float("-inf"), value * LN2)
        tl.store(lse + bh.to(tl.int64) * lse_rows + rows, value, mask=live)
