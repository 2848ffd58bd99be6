"""Triton code that quantises: one read of Q, K and V each, one write of what attention multiplies.

FP8 V stores its keys permuted inside groups of 16, in the order in which P leaves the first
product's registers, so that P needs no shuffle (SageAttention2, section 3.4).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.attention.primitives import scratch_row, sequence
from sage_plugin.kernels.quant.statistics_kernels import (
    RESIDUAL_UNITS,
    first_seen_key,
    key_terms,
)


@triton.jit
def _round_even(x):
    """Nearest integer, ties to even, for |x| < 2^22; the same on a GPU and in the interpreter."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_granule(x, amax, QMAX: tl.constexpr, QK8: tl.constexpr):
    """Values on the grid of INT8 or in the range of FP8; 0 where the granule is not finite."""
    y = x * (QMAX / amax)
    y = tl.where(y == y, y, 0.0)
    if QK8:
        return _round_even(y)
    return tl.minimum(tl.maximum(y, -QMAX), QMAX)


@triton.jit
def _rotated(x, ROWS: tl.constexpr, DP: tl.constexpr, TURNS: tl.constexpr):
    """Walsh-Hadamard transform of every block of 2^TURNS channels: sums and differences."""
    for stage in tl.static_range(TURNS):
        pairs = x.reshape([ROWS, DP // (2 << stage), 2, 1 << stage]).permute(0, 1, 3, 2)
        a, b = tl.split(pairs)
        x = tl.join(a + b, a - b).permute(0, 1, 3, 2).reshape([ROWS, DP])
    return x * (1.0 / tl.sqrt((1 << TURNS) * 1.0))


@triton.jit
def _shared_scale(magnitude, ROWS: tl.constexpr, GRANULE: tl.constexpr):
    """Largest magnitude of each granule of rows; a row that is not finite keeps its own."""
    if GRANULE == 1:
        return magnitude
    finite = magnitude < float("inf")
    groups = tl.where(finite, magnitude, 0.0).reshape([ROWS // GRANULE, GRANULE])
    largest = tl.broadcast_to(tl.max(groups, 1)[:, None], [ROWS // GRANULE, GRANULE])
    return tl.where(finite, largest.reshape([ROWS]), magnitude)


@triton.jit(do_not_specialize=["heads", "ratio", "seq", "q_rows", "blocks"])
def quantise_q_kernel(
    q, q8, q_scale, shift, k_mean, cu_seqlens, stride_qb, stride_qh, stride_qs, stride_qd,
    heads, ratio, seq, q_rows, blocks, multiplier,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, QK8: tl.constexpr,
    QMAX: tl.constexpr, TINY: tl.constexpr, SHIFT: tl.constexpr, TURNS: tl.constexpr,
    GRANULE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One block of queries: scale folded in, a scale a granule of rows, and q . mean(K)."""
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first, seq = sequence(cu_seqlens, b, seq, PACKED)
    start = (tl.program_id(0) % blocks) * ROWS
    padded = tl.cdiv(seq, BM) * BM
    if PACKED:
        if start >= padded:
            return
        q += first * stride_qs + h * stride_qh
    else:
        q += b * stride_qb + h * stride_qh
    d = tl.arange(0, DP)
    n = (start + tl.arange(0, ROWS)).to(tl.int64)
    live = (n < seq)[:, None] & (d < D)[None, :]
    at = q + n[:, None] * stride_qs + d.to(tl.int64)[None, :] * stride_qd
    x = tl.load(at, mask=live, other=0.0).to(tl.float32) * multiplier
    rows = scratch_row(first, b, h, heads, q_rows, BM, PACKED) + n
    inside = n < padded
    if SHIFT:
        mean = tl.load(k_mean + (b * (heads // ratio) + h // ratio) * DP + d)
        tl.store(shift + rows, tl.sum(x * mean[None, :], 1), mask=inside)
    if TURNS > 0:
        x = _rotated(x, ROWS, DP, TURNS)
    magnitude = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    amax = tl.maximum(_shared_scale(magnitude, ROWS, GRANULE), TINY)
    y = _to_granule(x, amax[:, None], QMAX, QK8)
    to = q8 + rows[:, None] * DP + d[None, :]
    tl.store(to, y.to(q8.dtype.element_ty), mask=inside[:, None])
    tl.store(q_scale + rows, amax / QMAX, mask=inside)


@triton.jit(do_not_specialize=["heads", "seq_q", "seq", "left", "blocks"])
def quantise_kv_kernel(
    k, v, k8, v8, k_scale, k_scale_finite, key_term, k_mean, v_mean, v_scale, v_residual,
    key_mask, cu_seqlens_q, cu_seqlens,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    stride_mb, stride_mh, stride_mk, heads, seq_q, seq, left, k_rows, blocks,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, QK8: tl.constexpr, QMAX: tl.constexpr,
    TINY: tl.constexpr, PV8: tl.constexpr, VMAX: tl.constexpr, K_MEAN: tl.constexpr,
    MASKED: tl.constexpr, LEFT: tl.constexpr, TURNS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One block of keys and values; what is past the end, unseen or not finite is zero."""
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    b, h = bh // heads, bh % heads
    first, seq = sequence(cu_seqlens, b, seq, PACKED)
    if PACKED:
        if block * BN >= seq:
            return
        k += first * stride_ks + h * stride_kh
        v += first * stride_vs + h * stride_vh
    else:
        k += b * stride_kb + h * stride_kh
        v += b * stride_vb + h * stride_vh
    if MASKED:
        key_mask += b * stride_mb + h * stride_mh
    d = tl.arange(0, DP)
    n = (block * BN + tl.arange(0, BN)).to(tl.int64)
    row = scratch_row(first, b, h, heads, k_rows, BN, PACKED) + block * BN
    rows = row + tl.arange(0, BN)
    first_seen = first_seen_key(cu_seqlens_q, b, seq_q, seq, left, LEFT, PACKED)
    term = key_terms(key_mask, n, (n < seq) & (n >= first_seen), stride_mk, MASKED)
    seen = term != float("-inf")
    live = seen[:, None] & (d < D)[None, :]
    at = k + n[:, None] * stride_ks + d.to(tl.int64)[None, :] * stride_kd
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    v_at = v + n[:, None] * stride_vs + d.to(tl.int64)[None, :] * stride_vd
    w = tl.load(v_at, mask=live, other=0.0).to(tl.float32)
    whole = (tl.abs(x) < float("inf")) & (tl.abs(w) < float("inf"))
    bad = tl.max(tl.where(whole, 0, 1), 1) > 0
    live = live & (bad == 0)[:, None]
    tl.store(key_term + rows, tl.where(bad, float("nan"), term))

    if K_MEAN:
        x -= tl.load(k_mean + bh * DP + d)[None, :]
    x = tl.where(live, x, 0.0)
    if TURNS > 0:
        x = _rotated(x, BN, DP, TURNS)
    amax = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), TINY)
    y = _to_granule(x, amax, QMAX, QK8)
    tl.store(k8 + rows[:, None] * DP + d[None, :], y.to(k8.dtype.element_ty))
    at = row // BN
    poisoned = tl.max(bad.to(tl.int32), 0) > 0
    tl.store(k_scale_finite + at, amax / QMAX)
    tl.store(k_scale + at, tl.where(poisoned, float("nan"), amax / QMAX))

    w = tl.load(v_at, mask=live, other=0.0).to(tl.float32)  # again: two tiles would not fit
    w = (w - tl.load(v_mean + bh * DP + d)[None, :]) / tl.load(v_scale + bh * DP + d)[None, :]
    w = tl.where(live, tl.minimum(tl.maximum(w, -VMAX), VMAX), 0.0)
    if PV8:
        lost = tl.sum(w.to(v8.dtype.element_ty).to(tl.float32) - w, 0)
        lost = _round_even(lost * RESIDUAL_UNITS).to(tl.int32)
        tl.atomic_add(v_residual + bh * DP + d, lost, sem="relaxed")
    w = w.to(v8.dtype.element_ty)
    if PV8:
        w = w.reshape([BN // 16, 2, 4, 2, DP]).permute(0, 2, 1, 3, 4).reshape([BN, DP])
        if PACKED:
            to = v8 + (h * DP + d[:, None]) * k_rows
            column = (first // BN + b + block) * BN
        else:
            to = v8 + (bh * DP + d[:, None]) * k_rows
            column = block.to(tl.int64) * BN
        tl.store(to + (column + tl.arange(0, BN))[None, :], tl.trans(w))
    else:
        tl.store(v8 + rows[:, None] * DP + d[None, :], w)
