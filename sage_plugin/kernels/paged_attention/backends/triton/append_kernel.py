"""The Triton kernel that writes new keys and values to the pages of their sequences.

Grid: a program for each key head of each page that a sequence may touch. Sequences begin at
tiles of their own, found as in `attention_kernel`; a page that does not exist is not written. 8-bit
pages have a scale for each head: where a new token exceeds it, the whole page is written anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sage_plugin.kernels.paged_attention.backends.triton.attention_kernel import (
    SEARCHED,
    clamped_start,
)


@dataclass(frozen=True)
class AppendConfig:
    """What the kernel is compiled for.

    Attributes:
        HEAD_DIM: channels of a head; BLOCK_D is the same padded to a power of two.
        PAGE: tokens of a page; BLOCK_P is the same padded to a power of two.
        LIMIT: the largest value of an 8-bit cache, 0 of others; ROUND where it holds integers.
    """

    HEAD_DIM: int
    BLOCK_D: int
    PAGE: int
    BLOCK_P: int
    LIMIT: float
    ROUND: bool


class AppendedTensors(NamedTuple):
    """What a launch points to, K and V alike in pairs."""

    new: Any
    cache: Any
    scale: Any
    page_table: Any
    kv_lens: Any
    cu_q_lens: Any


class AppendedStrides(NamedTuple):
    """Strides of the new rows, of the cache and of its scales."""

    new: Any
    cache: Any
    scale: Any
    table: Any


@triton.jit
def _rounded(wide, cache, CONFIG: tl.constexpr):
    """Numbers of an 8-bit cache, as it holds them."""
    if CONFIG.ROUND:
        # the sum rounds to an integer, halves to the even one
        wide = (wide + 12582912.0) - 12582912.0
    wide = tl.minimum(tl.maximum(wide, -CONFIG.LIMIT), CONFIG.LIMIT)
    return wide.to(cache.dtype.element_ty)


@triton.jit
def _append(x, strides, number, h, token, slot, old, fresh, CONFIG: tl.constexpr):
    """Write the new tokens of one page: `(BLOCK_P, BLOCK_D)` of keys or of values."""
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    new = x.new + h * strides.new.head
    cache = x.cache + number * strides.cache.page + h * strides.cache.head
    rows = token * strides.new.token
    slots = slot * strides.cache.slot
    offs_d = tl.arange(0, BLOCK_D)
    inside = (offs_d < CONFIG.HEAD_DIM)[None, :]
    tile = tl.load(new + rows[:, None] + offs_d[None, :], mask=fresh[:, None] & inside, other=0.0)
    to = cache + slots[:, None] + offs_d[None, :]
    if CONFIG.LIMIT == 0:
        tl.store(to, tile.to(cache.dtype.element_ty), mask=fresh[:, None] & inside)
    else:
        wide = tile.to(tl.float32)
        unit = tl.max(tl.max(tl.abs(wide), 1), 0) / CONFIG.LIMIT
        scale = x.scale + number * strides.scale.page + h * strides.scale.head
        kept = tl.max(old.to(tl.int32), 0) > 0
        before = tl.where(kept, tl.load(scale), 0.0)
        if not CONFIG.ROUND:
            # by a power of two, by which FP8 numbers are divided without loss: the next one
            growth = unit / tl.where(before > 0.0, before, unit)
            bits = (growth.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            grown = before * bits.to(tl.float32, bitcast=True)
            unit = tl.where((growth > 1.0) & (growth < 1.2676506002282294e30), grown, unit)
        odd = tl.sum(tl.sum((~(tl.abs(wide) < float("inf"))).to(tl.int32), 1), 0)
        unit = tl.where((odd > 0) | (before != before), float("nan"), tl.maximum(unit, before))
        divisor = tl.where(unit > 0.0, unit, 1.0)
        tl.store(to, _rounded(wide / divisor, cache, CONFIG), mask=fresh[:, None] & inside)
        if kept & (unit > before):
            held = tl.load(to, mask=old[:, None] & inside, other=0.0).to(tl.float32) * before
            tl.store(to, _rounded(held / divisor, cache, CONFIG), mask=old[:, None] & inside)
        tl.store(scale, unit)


@triton.jit(do_not_specialize=["T", "B", "pages", "max_keys"])
def append_kernel(k, v, strides_k, strides_v, T, B, heads_k, pages, max_keys, CONFIG: tl.constexpr):
    """Write one page's new tokens of one key head; `k` and `v` are `AppendedTensors`."""
    PAGE: tl.constexpr = CONFIG.PAGE
    BLOCK_P: tl.constexpr = CONFIG.BLOCK_P
    h = tl.program_id(0) % heads_k
    tile = tl.program_id(0) // heads_k
    # after s sequences of `start` rows in all, `start // PAGE + 2 * s` pages are enough
    count = tl.full([], 0, tl.int32)
    for first in range(0, B, SEARCHED):
        s = first + tl.arange(0, SEARCHED)
        begins = clamped_start(k.cu_q_lens, s, T, B) // PAGE + 2 * s
        count += tl.sum(((begins <= tile) & (s < B)).to(tl.int32), 0)
    s = tl.maximum(count - 1, 0)
    start = clamped_start(k.cu_q_lens, s, T, B)
    seq_q = clamped_start(k.cu_q_lens, s + 1, T, B) - start
    seq_k = tl.minimum(tl.load(k.kv_lens + s).to(tl.int32), max_keys)
    position = tl.maximum(seq_k - seq_q, 0)
    entry = position // PAGE + tile - (start // PAGE + 2 * s)
    if (seq_q <= 0) | (entry * PAGE >= seq_k):
        return
    table = k.page_table + s.to(tl.int64) * strides_k.table.row + entry * strides_k.table.entry
    number = tl.load(table).to(tl.int64)
    if (number < 0) | (number >= pages):
        return
    slot = tl.arange(0, BLOCK_P)
    at = entry * PAGE + slot
    fresh = (slot < PAGE) & (at >= position) & (at < seq_k)
    old = (slot < PAGE) & (at < position)
    token = (start + seq_q - seq_k + at).to(tl.int64)
    _append(k, strides_k, number, h.to(tl.int64), token, slot, old, fresh, CONFIG)
    _append(v, strides_v, number, h.to(tl.int64), token, slot, old, fresh, CONFIG)
