"""The Triton kernel that joins the splits of paged attention by their log-sum-exp.

Grid: a program for each token and query head. Splits without a visible key have an LSE of -inf, and
their output is not read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sage_plugin.kernels.paged_attention.backends.triton.attention_kernel import (
    SEARCHED,
    clamped_start,
    is_elsewhere,
    rows_of_sequence,
)
from sage_plugin.kernels.primitives import LN2, LOG2E, LOWEST


class SplitTensors(NamedTuple):
    """What a launch points to."""

    parts: Any
    part_lse: Any
    out: Any
    lse: Any
    cu_q_lens: Any
    sinks: Any


@triton.jit
def _sequence_of(cu_q_lens, row, T, B):
    """The sequence of a row, and how many rows it has."""
    count = tl.full([], 0, tl.int32)
    for first in range(0, B + 1, SEARCHED):
        s = first + tl.arange(0, SEARCHED)
        begun = (clamped_start(cu_q_lens, s, T, B) <= row) & (s <= B)
        count += tl.sum(begun.to(tl.int32), 0)
    s = tl.maximum(count - 1, 0)
    return s, clamped_start(cu_q_lens, s + 1, T, B) - clamped_start(cu_q_lens, s, T, B)


@triton.jit(do_not_specialize=["T", "B"])
def combine_kernel(tensors, T, B, heads_q, CONFIG: tl.constexpr, BLOCK_S: tl.constexpr):
    """Join the splits of one row; parts are as `paged_attention_kernel` leaves them."""
    SPLITS: tl.constexpr = CONFIG.SPLITS
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    pid = tl.program_id(0)
    row, head = pid // heads_q, pid % heads_q
    if CONFIG.MAX_Q > 0:
        here = rows_of_sequence(tensors.cu_q_lens, row // CONFIG.MAX_Q, T, B)
        if row % CONFIG.MAX_Q >= here.seq_q:
            return
        if is_elsewhere(here.s, here.seq_q, B, CONFIG):
            return
        row = here.start + row % CONFIG.MAX_Q
    elif CONFIG.MIN_Q > 0:
        s, seq_q = _sequence_of(tensors.cu_q_lens, row, T, B)
        if is_elsewhere(s, seq_q, B, CONFIG):
            return
    to_row = row.to(tl.int64)
    at = pid.to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    lse = tl.load(
        tensors.part_lse + at * SPLITS + offs_s, mask=offs_s < SPLITS, other=float("-inf")
    )  # (BLOCK_S)
    seen = lse != float("-inf")
    top = tl.maximum(tl.max(lse, 0), LOWEST)
    weight = tl.where(seen, tl.math.exp2(lse - top), 0.0)
    total = tl.sum(weight, 0)
    alive = total != 0.0
    # parts: (BLOCK_S, BLOCK_D)
    parts = tensors.parts + (at * SPLITS + offs_s)[:, None] * CONFIG.HEAD_DIM + offs_d[None, :]
    inside = offs_d < CONFIG.HEAD_DIM
    part = tl.load(parts, mask=seen[:, None] & inside[None, :], other=0.0)
    acc = tl.sum(part * weight[:, None], 0)
    if CONFIG.SINKS:
        sink = tl.load(tensors.sinks + head).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        alpha = tl.math.exp2(top - new)
        norm = total * alpha + tl.math.exp2(sink - new)
        acc = acc * alpha
        top = new
    else:
        norm = tl.where(alive, total, 1.0)
    out = tl.where(alive, acc / norm, 0.0)
    to = tensors.out + (to_row * heads_q + head) * CONFIG.HEAD_DIM + offs_d
    tl.store(to, out.to(tensors.out.dtype.element_ty), mask=inside)
    if CONFIG.LSE:
        value = (tl.log2(norm) + top) * LN2
        if not CONFIG.SINKS:
            value = tl.where(alive, value, float("-inf"))
        tl.store(tensors.lse + head.to(tl.int64) * T + to_row, value)
