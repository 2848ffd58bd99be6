"""The Triton kernel of paged attention: ragged queries, keys and values found through a page table.

A program takes a tile of rows: a few tokens of one sequence, with all query heads that share a key
head. Which sequence a tile belongs to is searched among the cumulative lengths, so that the grid
follows from shapes alone; tiles beyond the last end at once. Rows of Q behind the last sequence
form one more sequence, which has no keys. The keys of a tile may be parted among programs (splits),
which `combine_kernel` joins.

8-bit caches are multiplied in fp16, which holds their values exactly, with rows of Q divided by
their largest magnitude; or Q is quantized, and the first product is one of 8-bit numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sage_plugin.kernels.primitives import (
    LN2,
    LOG2E,
    LOWEST,
    key_blocks,
    soft_cap,
    visible_keys,
    with_sink,
)

SEARCHED = tl.constexpr(128)
"""Cumulative lengths that are looked through at once."""


@dataclass(frozen=True)
class PagedConfig:
    """What the kernels are compiled for.

    Attributes:
        HEAD_DIM: channels of a head; BLOCK_D is the same padded to a power of two.
        BLOCK_M: rows of a tile, of which BLOCK_Q tokens with GROUP heads each are used.
        BLOCK_N: keys of a step.
        PAGE: tokens of a page; WITHIN tells that a step never leaves its page.
        SPLITS: programs that share the keys of a tile.
        STAGES: steps that are loaded ahead.
        MIN_Q, MAX_Q: sequences with fewer or more tokens are another launch's; 0 for no limit. No
            more than a tile holds MAX_Q, and each sequence has one.
        HEADS_FIRST: neighbors in the grid take the key heads of a tile, and not its other tiles.
        CACHE8: the caches have 8 bits.
        QUANTIZED: 1 where Q is quantized to INT8, 2 to FP8; Q_TYPE is what it becomes, and Q_LIMIT
            the value of its largest magnitude.
        FINITE: the caches cannot hold NaN or infinity.
        FOLD: the factor of the scores is positive, and nothing but it changes those of a page.
        TMA: keys and values are loaded through descriptors.
        LEFT: whether a window ends before a row; RIGHT after it.
        SOFTCAP, SINKS, LSE: whether a call has them.
    """

    HEAD_DIM: int
    BLOCK_D: int
    BLOCK_M: int
    BLOCK_Q: int
    GROUP: int
    BLOCK_N: int
    PAGE: int
    WITHIN: bool
    SPLITS: int
    STAGES: int
    MIN_Q: int
    MAX_Q: int
    HEADS_FIRST: bool
    CACHE8: bool
    QUANTIZED: int
    Q_TYPE: Any
    Q_LIMIT: float
    FINITE: bool
    FOLD: bool
    TMA: bool
    LEFT: bool
    RIGHT: bool
    SOFTCAP: bool
    SINKS: bool
    LSE: bool


class PagedTensors(NamedTuple):
    """What a launch points to; `out` and `lse` are parts of a split where there are several."""

    q: Any
    out: Any
    lse: Any
    page_table: Any
    kv_lens: Any
    cu_q_lens: Any
    k_scale: Any
    v_scale: Any
    sinks: Any


class CacheStrides(NamedTuple):
    """Strides of a cache, whose channels lie side by side."""

    page: Any
    slot: Any
    head: Any


class QueryStrides(NamedTuple):
    """Strides of Q."""

    token: Any
    head: Any
    channel: Any


class PageStrides(NamedTuple):
    """Strides of the page table."""

    row: Any
    entry: Any


class ScaleStrides(NamedTuple):
    """Strides of the scales of a cache."""

    page: Any
    head: Any


class PagedStrides(NamedTuple):
    """Strides of the tensors of a launch."""

    q: QueryStrides
    k: CacheStrides
    v: CacheStrides
    table: PageStrides
    k_scale: ScaleStrides
    v_scale: ScaleStrides


class PagedRows(NamedTuple):
    """The rows of a program, in a kernel; `s` is the sequence, past the last for rows of none."""

    s: Any
    start: Any
    seq_q: Any
    first_row: Any


class StepPage(NamedTuple):
    """The page of a step and its scales, or those of each key, in a kernel."""

    number: Any
    k_scale: Any
    v_scale: Any


class PagedHead(NamedTuple):
    """A key head of a sequence, in a kernel."""

    k: Any
    v: Any
    table: Any
    h: Any
    pages: Any
    seq_k: Any
    left: Any
    right: Any
    softcap: Any


@triton.jit
def clamped_start(cu_q_lens, s, T, B):
    """First row of a sequence, inside of Q whatever the lengths hold; `T` past the last one."""
    start = tl.load(cu_q_lens + tl.minimum(s, B)).to(tl.int32)
    return tl.where(s > B, T, tl.minimum(tl.maximum(start, 0), T))


@triton.jit
def rows_of_tile(cu_q_lens, tile, T, B, BLOCK_Q: tl.constexpr):
    """The sequence and the rows of a tile.

    After s sequences of `start` rows in all, `start // BLOCK_Q + s` tiles are enough whatever their
    lengths were: each sequence begins at a tile of its own.
    """
    count = tl.full([], 0, tl.int32)
    for first in range(0, B + 1, SEARCHED):
        s = first + tl.arange(0, SEARCHED)
        begins = clamped_start(cu_q_lens, s, T, B) // BLOCK_Q + s
        count += tl.sum(((begins <= tile) & (s <= B)).to(tl.int32), 0)
    s = tl.maximum(count - 1, 0)
    start = clamped_start(cu_q_lens, s, T, B)
    seq_q = clamped_start(cu_q_lens, s + 1, T, B) - start
    return PagedRows(s, start, seq_q, (tile - (start // BLOCK_Q + s)) * BLOCK_Q)


@triton.jit
def rows_of_sequence(cu_q_lens, s, T, B):
    """The rows of a sequence that has no more than a tile."""
    start = clamped_start(cu_q_lens, s, T, B)
    return PagedRows(s, start, clamped_start(cu_q_lens, s + 1, T, B) - start, 0)


@triton.jit
def is_elsewhere(s, seq_q, B, CONFIG: tl.constexpr):
    """Whether a sequence is another launch's."""
    other = s < 0
    if CONFIG.MIN_Q > 0:
        other = other | ((seq_q < CONFIG.MIN_Q) & (s < B))
    if CONFIG.MAX_Q > 0:
        other = other | (seq_q > CONFIG.MAX_Q) | (s >= B)
    return other


@triton.jit
def _place(pid, tiles, heads_k, CONFIG: tl.constexpr):
    """Tile, key head and split of a program; the last tiles, with the most keys, go first."""
    if CONFIG.HEADS_FIRST:
        h = pid % heads_k
        split = pid // heads_k % CONFIG.SPLITS
        tile = pid // heads_k // CONFIG.SPLITS
    else:
        tile = tiles - 1 - pid % tiles
        split = pid // tiles % CONFIG.SPLITS
        h = pid // tiles // CONFIG.SPLITS
    return tile, h, split


@triton.jit
def _queries(q, row_live, CONFIG: tl.constexpr):
    """Rows of Q as the first product takes them, and what their scores are multiplied by."""
    factor = row_live.to(tl.float32)
    if CONFIG.CACHE8:
        wide = q.to(tl.float32)
        top = tl.max(tl.abs(wide), 1)
        # A row with NaN keeps it, in its factor.
        bad = tl.sum(tl.where(tl.abs(wide) < float("inf"), 0, 1), 1) > 0
        unit = tl.where((top > 0.0) & ~bad, top, 1.0) / CONFIG.Q_LIMIT
        scaled = tl.where(bad[:, None], 0.0, wide / unit[:, None])
        if CONFIG.QUANTIZED == 1:
            # the sum rounds to an integer, halves to the even one
            scaled = (scaled + 12582912.0) - 12582912.0
        q = scaled.to(CONFIG.Q_TYPE)
        factor = tl.where(bad, float("nan"), unit)
    return q, factor


@triton.jit
def _tile(cache, strides, page, there, slot, head, CONFIG: tl.constexpr, MASKED: tl.constexpr,
          live):  # fmt: skip
    """Keys or values of a step, (BLOCK_N, BLOCK_D); what is in no page of the sequence is 0."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    if CONFIG.TMA:
        # a page past the last one reads as zeros
        at = tl.where(there, page, head.pages).to(tl.int32)
        tile = cache.load([at, slot, (head.h * BLOCK_D).to(tl.int32)])
        tile = tile.reshape([BLOCK_N, BLOCK_D])
    else:
        offs_d = tl.arange(0, BLOCK_D)
        base = cache + head.h.to(tl.int64) * strides.head
        if CONFIG.WITHIN:
            base += page.to(tl.int64) * strides.page + slot.to(tl.int64) * strides.slot
            at = base + (tl.arange(0, BLOCK_N) * strides.slot)[:, None] + offs_d[None, :]
            mask = there & (offs_d >= 0)[None, :]
        else:
            rows = page.to(tl.int64) * strides.page + slot.to(tl.int64) * strides.slot
            at = base + rows[:, None] + offs_d[None, :]
            mask = there[:, None] & (offs_d >= 0)[None, :]
        if MASKED:
            mask = mask & live[:, None]
        if CONFIG.HEAD_DIM != BLOCK_D:
            mask = mask & (offs_d < CONFIG.HEAD_DIM)[None, :]
        tile = tl.load(at, mask=mask, other=0.0)
    return tile


@triton.jit
def _page_number(head, strides, j, CONFIG: tl.constexpr):
    """The page of a step, or the one of each of its keys; -1 past the last key."""
    first = j * CONFIG.BLOCK_N
    if CONFIG.WITHIN:
        keys = first
    else:
        BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
        keys = first + tl.arange(0, BLOCK_N)
    entry = head.table + keys // CONFIG.PAGE * strides.table.entry
    return tl.load(entry, mask=keys < head.seq_k, other=-1)


@triton.jit
def _page(number, head, tensors, strides):
    """A page with its scales, loaded a step before they are needed."""
    there = (number >= 0) & (number < head.pages)
    k_scale = tl.full([], 1.0, tl.float32)
    v_scale = tl.full([], 1.0, tl.float32)
    if tensors.k_scale is not None:
        of_k = tensors.k_scale + number.to(tl.int64) * strides.k_scale.page
        k_scale = tl.load(of_k + head.h * strides.k_scale.head, mask=there, other=0.0)
    if tensors.v_scale is not None:
        of_v = tensors.v_scale + number.to(tl.int64) * strides.v_scale.page
        v_scale = tl.load(of_v + head.h * strides.v_scale.head, mask=there, other=0.0)
    return StepPage(number, k_scale, v_scale)


@triton.jit
def _step(
    head, tensors, strides, q, factor, here, page, j, m_i, l_i, acc, CONFIG: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """One step of keys and the page of the next.

    Where a key can be hidden, what is not finite in V is kept out of P V.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    PAGE: tl.constexpr = CONFIG.PAGE
    offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < head.seq_k
    following = _page_number(head, strides, j + 1, CONFIG)
    there = (page.number >= 0) & (page.number < head.pages)
    slot = j * BLOCK_N % PAGE if CONFIG.WITHIN else offs_n % PAGE
    k_tile = _tile(head.k, strides.k, page.number, there, slot, head, CONFIG, EDGE, inside)
    v_tile = _tile(head.v, strides.v, page.number, there, slot, head, CONFIG, EDGE, inside)
    if CONFIG.CACHE8 and CONFIG.QUANTIZED == 0:
        k_tile = k_tile.to(tl.float16)
    if CONFIG.CACHE8:
        v_tile = v_tile.to(tl.float16)
    # scores: (BLOCK_M, BLOCK_N), in log2 units
    if CONFIG.QUANTIZED == 1:
        qk = tl.dot(q, tl.trans(k_tile), out_dtype=tl.int32).to(tl.float32)
    else:
        qk = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
    hidden = tl.where(there, 0.0, float("-inf"))
    if tensors.k_scale is not None and CONFIG.WITHIN:
        factor = factor * page.k_scale
    FOLDED: tl.constexpr = CONFIG.FOLD and not EDGE
    if not FOLDED:
        qk = qk * factor[:, None]
        if tensors.k_scale is not None and not CONFIG.WITHIN:
            qk = qk * page.k_scale[None, :]
        if CONFIG.SOFTCAP:
            qk = soft_cap(qk, head.softcap)
        qk += hidden if CONFIG.WITHIN else hidden[None, :]
    v_scale = page.v_scale
    if EDGE:
        if not CONFIG.FINITE:
            if CONFIG.TMA:  # reads what lies in a page behind the last key
                v_tile = tl.where(inside[:, None], v_tile, 0.0)
            finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
            bad = tl.max(tl.where(finite, 0, 1), 1) > 0
            v_tile = tl.where(finite, v_tile, 0.0)
            qk += tl.where(bad, float("nan"), 0.0)[None, :]
        if tensors.v_scale is not None:
            fine = tl.abs(v_scale) < float("inf")
            lost = tl.where(fine, 0.0, float("nan"))
            qk += lost if CONFIG.WITHIN else lost[None, :]
            v_scale = tl.where(fine, v_scale, 0.0)
        rows = here.first_row + tl.arange(0, BLOCK_M) // CONFIG.GROUP
        seen = visible_keys(
            rows, offs_n, here.seq_q, head.seq_k, head.left, head.right, CONFIG.LEFT, CONFIG.RIGHT
        )
        qk = tl.where(seen, qk, float("-inf"))
    # online softmax
    if FOLDED:
        # the factor of a row goes into its exponents: a multiply-add instead of two operations
        m_new = tl.maximum(m_i, tl.max(qk, 1) * factor + hidden)
        p = tl.math.exp2(qk * factor[:, None] - (m_new - hidden)[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_new[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    # P V
    if tensors.v_scale is not None:
        unit = v_scale
        if not CONFIG.WITHIN:
            # weights take the scales of their pages, as parts of the largest
            unit = tl.max(v_scale, 0)
            p = p * (v_scale / tl.where(unit > 0.0, unit, 1.0))[None, :]
        pv = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        acc = acc * alpha[:, None] + pv * unit
    else:
        p = p.to(v_tile.dtype)
        acc = tl.dot(p, v_tile, acc * alpha[:, None], input_precision="ieee")
    return _page(following, head, tensors, strides), m_new, l_i, acc


@triton.jit
def _fold(head, tensors, strides, q, factor, here, split, CONFIG: tl.constexpr):
    """Online softmax over the steps of a split: `m_i`, `l_i`, `acc`."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, inner, outer, end = key_blocks(
        here.first_row, here.seq_q, head.seq_k, head.left, head.right, CONFIG.BLOCK_Q,
        CONFIG.BLOCK_N, CONFIG.LEFT, CONFIG.RIGHT,
    )  # fmt: skip
    if CONFIG.SPLITS > 1:
        part = tl.cdiv(tl.maximum(end - begin, 0), CONFIG.SPLITS)
        begin = tl.minimum(begin + split * part, end)
        end = tl.minimum(begin + part, end)
        inner = tl.minimum(tl.maximum(inner, begin), end)
        outer = tl.minimum(tl.maximum(outer, inner), end)
    page = _page(_page_number(head, strides, begin, CONFIG), head, tensors, strides)
    # The edge of a window, steps that all rows see, then the diagonal and the tail.
    if CONFIG.LEFT:
        for j in tl.range(begin, inner, num_stages=1):
            page, m_i, l_i, acc = _step(
                head, tensors, strides, q, factor, here, page, j, m_i, l_i, acc, CONFIG, True
            )
    for j in tl.range(inner, outer, num_stages=CONFIG.STAGES):
        page, m_i, l_i, acc = _step(
            head, tensors, strides, q, factor, here, page, j, m_i, l_i, acc, CONFIG, False
        )
    for j in tl.range(outer, end, num_stages=1):
        page, m_i, l_i, acc = _step(
            head, tensors, strides, q, factor, here, page, j, m_i, l_i, acc, CONFIG, True
        )
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["T", "B", "tiles", "pages", "max_keys", "left", "right"])
def paged_attention_kernel(
    k, v, tensors, strides, T, B, tiles, heads_k, pages, max_keys, left, right, scale, softcap,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Attention of a tile over its keys or a split of them.

    Where there are splits, `out` is `(T, Hq, SPLITS, D)` and `lse` `(T, Hq, SPLITS)` in log2 units,
    or of `B * MAX_Q` rows in place of T where MAX_Q limits them; else they are `(T, Hq, D)` and
    `(Hq, T)`. `scale` and `softcap` have log2 e folded in.
    """
    GROUP: tl.constexpr = CONFIG.GROUP
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    tile, h, split = _place(tl.program_id(0), tiles, heads_k, CONFIG)
    if CONFIG.MAX_Q > 0:
        here = rows_of_sequence(tensors.cu_q_lens, tile, T, B)
    else:
        here = rows_of_tile(tensors.cu_q_lens, tile, T, B, CONFIG.BLOCK_Q)
    if here.first_row >= here.seq_q:
        return
    if is_elsewhere(here.s, here.seq_q, B, CONFIG):
        return
    own = tl.minimum(here.s, B - 1)
    seq_k = tl.load(tensors.kv_lens + own, mask=here.s < B, other=0).to(tl.int32)
    seq_k = tl.minimum(tl.maximum(seq_k, 0), max_keys)
    table = tensors.page_table + own.to(tl.int64) * strides.table.row
    # Q: (BLOCK_M, BLOCK_D), the heads of a token side by side
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    token = here.first_row + offs_m // GROUP
    row_live = (offs_m < CONFIG.BLOCK_Q * GROUP) & (token < here.seq_q)
    live = row_live[:, None] & (offs_d < CONFIG.HEAD_DIM)[None, :]
    row = (here.start + token).to(tl.int64)
    head_q = h * GROUP + offs_m % GROUP
    q_at = tensors.q + (row * strides.q.token + head_q * strides.q.head)[:, None]
    q_tile = tl.load(q_at + (offs_d * strides.q.channel)[None, :], mask=live, other=0.0)
    q_tile, factor = _queries(q_tile, row_live, CONFIG)
    # the keys of this split
    head = PagedHead(k, v, table, h, pages, seq_k, left, right, softcap)
    m_i, l_i, acc = _fold(head, tensors, strides, q_tile, factor * scale, here, split, CONFIG)
    # output: (BLOCK_M, BLOCK_D), and the log-sum-exp
    alive = l_i != 0.0  # NaN is alive: it has to be seen
    at = row * (heads_k * GROUP) + head_q
    if CONFIG.SPLITS > 1:
        if CONFIG.MAX_Q > 0:
            at = (own.to(tl.int64) * CONFIG.MAX_Q + token) * (heads_k * GROUP) + head_q
        at = at * CONFIG.SPLITS + split
        norm = tl.where(alive, l_i, 1.0)
        value = tl.where(alive, tl.log2(norm) + m_i, float("-inf"))
        tl.store(tensors.lse + at, value, mask=row_live)
        live = live & alive[:, None]  # the rest is not read
    elif CONFIG.SINKS:
        sink = tl.load(tensors.sinks + head_q, mask=row_live, other=0.0).to(tl.float32) * LOG2E
        m_i, norm, alpha = with_sink(m_i, l_i, sink, 0.0)
        acc = acc * alpha[:, None]
    else:
        norm = tl.where(alive, l_i, 1.0)
    if CONFIG.SPLITS == 1 and CONFIG.LSE:
        value = (tl.log2(norm) + m_i) * LN2
        if not CONFIG.SINKS:
            value = tl.where(alive, value, float("-inf"))
        tl.store(tensors.lse + head_q.to(tl.int64) * T + row, value, mask=row_live)
    out = tl.where(alive[:, None], acc / norm[:, None], 0.0)
    to = tensors.out + (at * CONFIG.HEAD_DIM)[:, None] + offs_d[None, :]
    tl.store(to, out.to(tensors.out.dtype.element_ty), mask=live)
