"""Triton code that quantises a block: one read, one write of what attention multiplies.

FP8 V stores its keys permuted inside groups of 16, in the order in which P leaves the first
product's registers, so that P needs no shuffle (SageAttention2, section 3.4).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sage_plugin.kernels.quantize.triton.statistics_kernels import RESIDUAL_UNITS

READ_ONCE = tl.constexpr("evict_first")
"""Cache policy of what no later program reads."""


@triton.jit
def _round_even(x):
    """Nearest integer, ties to even, for |x| < 2^22; the same on a GPU and in the interpreter."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _rounding_errors(w, FP8: tl.constexpr):
    """What each number gains by rounding to FP8.

    Of the negated numbers, which is the same but for its sign: ptxas 12.8 and 12.9 pack FP8 numbers
    by pairs, and where a pair has a second use that one reads another register.
    """
    return -((-w).to(FP8).to(tl.float32) + w)


@triton.jit
def _without_padding(x, D: tl.constexpr, DP: tl.constexpr):
    """FP8 numbers with zeros past the true channels.

    They were zeros before they became FP8. But channels that the compiler knows to be zero make
    pairs of one number twice, which ptxas 12.8 and 12.9 pack wrong.
    """
    if D >= 16:
        return x
    live = (tl.arange(0, DP) < D)[None, :]
    return tl.where(live, x.to(tl.int8, bitcast=True), 0).to(x.dtype, bitcast=True)


@triton.jit
def _store_granule(
    to, x, amax, mask, D: tl.constexpr, DP: tl.constexpr, QMAX: tl.constexpr, QK8: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Quantise and store finite values that are at most `amax`, which may be infinite.

    The last byte of an fp32 number just over 1.5 * 2^23 is what was added, rounded, in INT8. What
    passes the limit of FP8 by an error of the product rounds to the limit.
    """
    y = x * (QMAX / amax)
    if QK8:
        y = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        y = _without_padding(y.to(to.dtype.element_ty), D, DP)
    if MASKED:
        tl.store(to, y, mask=mask)
    else:
        tl.store(to, y)


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


@triton.jit
def quantize_queries(
    x, to, q_scale, inside, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QK8: tl.constexpr, QMAX: tl.constexpr, TINY: tl.constexpr, TURNS: tl.constexpr,
    GRANULE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Quantise a block of queries with the softmax scale folded in.

    Rows that are not finite become 0 and have an infinite scale.
    """
    y = x
    if TURNS > 0:
        y = _rotated(x, ROWS, DP, TURNS)
    bits = tl.abs(y).to(tl.int32, bitcast=True)  # in the order of the numbers, NaN above them all
    magnitude = tl.max(bits, 1).to(tl.float32, bitcast=True)
    finite = magnitude < float("inf")
    magnitude = tl.where(finite, magnitude, float("inf"))
    amax = tl.maximum(_shared_scale(magnitude, ROWS, GRANULE), TINY)
    y = tl.where(finite[:, None], y, 0.0)
    _store_granule(to, y, amax[:, None], inside[:, None], D, DP, QMAX, QK8, MASKED)
    tl.store(q_scale, amax / QMAX, mask=inside)


@triton.jit
def _store_keys(
    k8, k_scale, k_scale_finite, x, poisoned, D: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr, QK8: tl.constexpr, QMAX: tl.constexpr, TINY: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """Quantise a block of keys, which are finite and without their mean."""
    if TURNS > 0:
        x = _rotated(x, BN, DP, TURNS)
    amax = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), TINY)
    to = k8 + tl.arange(0, BN)[:, None] * DP + tl.arange(0, DP)[None, :]
    if amax < float("inf"):
        _store_granule(to, x, amax, None, D, DP, QMAX, QK8, False)
    else:
        tl.store(to, tl.zeros([BN, DP], tl.float32).to(k8.dtype.element_ty))
    tl.store(k_scale_finite, amax / QMAX)
    tl.store(k_scale, tl.where(poisoned, float("nan"), amax / QMAX))


@triton.jit
def value_rows(PART: tl.constexpr, BN: tl.constexpr):
    """Every fourth row in the stored order of keys: `PART` of each run of four that lie together.

    Inside 16 keys the runs are 2 i, 2 i + 1, 2 i + 8, 2 i + 9.
    """
    run = tl.arange(0, BN // 4)
    return run // 4 * 16 + run % 4 * 2 + (PART % 2 + PART // 2 * 8)


@triton.jit
def _scaled(w, mean, scale, VMAX: tl.constexpr):
    w = (w.to(tl.float32) - mean[None, :]) * (1.0 / scale)[None, :]
    return tl.clamp(w, -VMAX, VMAX)


@triton.jit
def _add_lost(residual, lost):
    """Add to the sums of rounding errors, in integers, which add up the same in any order."""
    tl.atomic_add(residual, _round_even(lost * RESIDUAL_UNITS).to(tl.int32), sem="relaxed")


@triton.jit
def _store_values_fp8(to, residual, w0, w1, w2, w3, k_rows, BN: tl.constexpr, DP: tl.constexpr):
    """Store the four parts of a block of values, a row a channel, and add up what rounding did."""
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BN // 4, DP, 4])
    w8 = w.to(to.dtype.element_ty)
    d = tl.arange(0, DP)
    lost = tl.sum(tl.sum(_rounding_errors(w, to.dtype.element_ty), 2), 0)
    _add_lost(residual + d, lost)
    at = to + d.to(tl.int64)[:, None] * k_rows + tl.arange(0, BN)[None, :]
    tl.store(at, w8.permute([1, 0, 2]).reshape([DP, BN]))


@triton.jit
def store_whole_keys(
    k8, k_scale, k_scale_finite, x, k_mean, D: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
    QK8: tl.constexpr, QMAX: tl.constexpr, TINY: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Quantise a block of keys that are all seen and finite."""
    x = x.to(tl.float32) - tl.load(k_mean + tl.arange(0, DP))[None, :]
    _store_keys(k8, k_scale, k_scale_finite, x, False, D, BN, DP, QK8, QMAX, TINY, TURNS)


@triton.jit
def store_whole_values(
    v8, v_residual, w0, w1, w2, w3, v_mean, v_scale, k_rows, BN: tl.constexpr, DP: tl.constexpr,
    PV8: tl.constexpr, VMAX: tl.constexpr,
):  # fmt: skip
    """Quantise a block of values that are all seen and finite; FP8 ones come in four parts."""
    d = tl.arange(0, DP)
    mean = tl.load(v_mean + d)
    scale = tl.load(v_scale + d)
    w0 = _scaled(w0, mean, scale, VMAX)
    if PV8:
        w1 = _scaled(w1, mean, scale, VMAX)
        w2 = _scaled(w2, mean, scale, VMAX)
        w3 = _scaled(w3, mean, scale, VMAX)
        _store_values_fp8(v8, v_residual, w0, w1, w2, w3, k_rows, BN, DP)
    else:
        to = v8 + tl.arange(0, BN)[:, None] * DP + d[None, :]
        tl.store(to, w0.to(v8.dtype.element_ty))


@triton.jit
def store_block(
    k8, k_scale, k_scale_finite, key_term, v8, v_residual, k, v, stride_ks, stride_kd, stride_vs,
    stride_vd, term, k_mean, v_mean, v_scale, k_rows,
    D: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, QK8: tl.constexpr, QMAX: tl.constexpr,
    TINY: tl.constexpr, PV8: tl.constexpr, VMAX: tl.constexpr, TURNS: tl.constexpr,
    K_MEAN: tl.constexpr,
):  # fmt: skip
    """Quantise any block of keys and values; what is unseen or not finite is zero."""
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    live = (term != float("-inf"))[:, None] & (d < D)[None, :]
    at = k + n.to(tl.int64)[:, None] * stride_ks + d.to(tl.int64)[None, :] * stride_kd
    v_at = v + n.to(tl.int64)[:, None] * stride_vs + d.to(tl.int64)[None, :] * stride_vd
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    w = tl.load(v_at, mask=live, other=0.0).to(tl.float32)
    whole = (tl.abs(x) < float("inf")) & (tl.abs(w) < float("inf"))
    bad = tl.max(tl.where(whole, 0, 1), 1) > 0
    live = live & (bad == 0)[:, None]
    tl.store(key_term + n, tl.where(bad, float("nan"), term))
    if K_MEAN:
        x -= tl.load(k_mean + d)[None, :]
    poisoned = tl.max(bad.to(tl.int32), 0) > 0
    x = tl.where(live, x, 0.0)
    _store_keys(k8, k_scale, k_scale_finite, x, poisoned, D, BN, DP, QK8, QMAX, TINY, TURNS)

    w = tl.load(v_at, mask=live, other=0.0)  # again: two tiles would not fit
    w = tl.where(live, _scaled(w, tl.load(v_mean + d), tl.load(v_scale + d), VMAX), 0.0)
    w8 = w.to(v8.dtype.element_ty)
    if PV8:
        lost = tl.sum(_rounding_errors(w, v8.dtype.element_ty), 0)
        _add_lost(v_residual + d, lost)
        w8 = _without_padding(w8, D, DP)
        w8 = w8.reshape([BN // 16, 2, 4, 2, DP]).permute(0, 2, 1, 3, 4).reshape([BN, DP])
        tl.store(v8 + d.to(tl.int64)[:, None] * k_rows + n[None, :], tl.trans(w8))
    else:
        tl.store(v8 + n[:, None] * DP + d[None, :], w8)
