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
def _without_padding(x, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """FP8 numbers with zeros past the true channels.

    They were zeros before they became FP8. But channels that the compiler knows to be zero make
    pairs of one number twice, which ptxas 12.8 and 12.9 pack wrong.
    """
    if HEAD_DIM >= 16:
        return x
    live = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    return tl.where(live, x.to(tl.int8, bitcast=True), 0).to(x.dtype, bitcast=True)


@triton.jit
def granule_values(x, amax, KIND: tl.constexpr, QMAX: tl.constexpr):
    """Finite values that are at most `amax`, which may be infinite, as INT8 or FP8 numbers.

    The last byte of an fp32 number just over 1.5 * 2^23 is what was added, rounded, in INT8. What
    passes the limit of FP8 by an error of the product rounds to the limit.
    """
    y = x * (QMAX / amax)
    if KIND.is_int():
        return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return y.to(KIND)


@triton.jit
def _store_granule(
    to, x, amax, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QMAX: tl.constexpr,
    QK8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Quantise and store finite values that are at most `amax`, which may be infinite."""
    y = granule_values(x, amax, to.dtype.element_ty, QMAX)
    if not QK8:
        y = _without_padding(y, HEAD_DIM, BLOCK_D)
    if MASKED:
        tl.store(to, y, mask=mask)
    else:
        tl.store(to, y)


@triton.jit
def rotated_channels(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TURNS: tl.constexpr):
    """Walsh-Hadamard transform of every block of 2^TURNS channels: sums and differences."""
    for stage in tl.static_range(TURNS):
        pairs = x.reshape([ROWS, BLOCK_D // (2 << stage), 2, 1 << stage]).permute(0, 1, 3, 2)
        a, b = tl.split(pairs)
        x = tl.join(a + b, a - b).permute(0, 1, 3, 2).reshape([ROWS, BLOCK_D])
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
def quantize_queries(x, to, q_scale, inside, CONFIG: tl.constexpr, MASKED: tl.constexpr):
    """Quantise a block of queries with the softmax scale folded in.

    Rows that are not finite become 0 and have an infinite scale.
    """
    ROWS: tl.constexpr = CONFIG.Q_ROWS
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    QMAX: tl.constexpr = CONFIG.QMAX
    y = x
    if CONFIG.TURNS > 0:
        y = rotated_channels(x, ROWS, BLOCK_D, CONFIG.TURNS)
    bits = tl.abs(y).to(tl.int32, bitcast=True)  # in the order of the numbers, NaN above them all
    magnitude = tl.max(bits, 1).to(tl.float32, bitcast=True)
    finite = magnitude < float("inf")
    magnitude = tl.where(finite, magnitude, float("inf"))
    amax = tl.maximum(_shared_scale(magnitude, ROWS, CONFIG.GRANULE), CONFIG.TINY)
    y = tl.where(finite[:, None], y, 0.0)
    _store_granule(
        to, y, amax[:, None], inside[:, None], CONFIG.HEAD_DIM, BLOCK_D, QMAX, CONFIG.QK8, MASKED
    )
    tl.store(q_scale, amax / QMAX, mask=inside)


@triton.jit
def _store_keys(to, x, poisoned, CONFIG: tl.constexpr):
    """Quantise a block of keys, which are finite and without their mean."""
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    QMAX: tl.constexpr = CONFIG.QMAX
    if CONFIG.TURNS > 0:
        x = rotated_channels(x, BLOCK_N, BLOCK_D, CONFIG.TURNS)
    amax = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), CONFIG.TINY)
    k8 = to.k8
    at = k8 + tl.arange(0, BLOCK_N)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    if amax < float("inf"):
        _store_granule(at, x, amax, None, HEAD_DIM, BLOCK_D, QMAX, CONFIG.QK8, False)
    else:
        tl.store(at, tl.zeros([BLOCK_N, BLOCK_D], tl.float32).to(k8.dtype.element_ty))
    tl.store(to.k_scale_finite, amax / QMAX)
    tl.store(to.k_scale, tl.where(poisoned, float("nan"), amax / QMAX))


@triton.jit
def value_rows(PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Every fourth row in the stored order of keys: `PART` of each run of four that lie together.

    Inside 16 keys the runs are 2 i, 2 i + 1, 2 i + 8, 2 i + 9.
    """
    run = tl.arange(0, BLOCK_N // 4)
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
def _store_values_fp8(
    to, residual, w0, w1, w2, w3, k_rows, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store the four parts of a block of values, a row a channel, and add up what rounding did."""
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BLOCK_N // 4, BLOCK_D, 4])
    w8 = w.to(to.dtype.element_ty)
    d = tl.arange(0, BLOCK_D)
    lost = tl.sum(tl.sum(_rounding_errors(w, to.dtype.element_ty), 2), 0)
    _add_lost(residual + d, lost)
    at = to + d.to(tl.int64)[:, None] * k_rows + tl.arange(0, BLOCK_N)[None, :]
    tl.store(at, w8.permute([1, 0, 2]).reshape([BLOCK_D, BLOCK_N]))


@triton.jit
def store_whole_keys(to, x, means, CONFIG: tl.constexpr):
    """Quantise a block of keys that are all seen and finite."""
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    x = x.to(tl.float32) - tl.load(means.k_mean + tl.arange(0, BLOCK_D))[None, :]
    _store_keys(to, x, False, CONFIG)


@triton.jit
def store_whole_values(to, w0, w1, w2, w3, means, k_rows, CONFIG: tl.constexpr):
    """Quantise a block of values that are all seen and finite; FP8 ones come in four parts."""
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    VMAX: tl.constexpr = CONFIG.VMAX
    offs_d = tl.arange(0, BLOCK_D)
    mean = tl.load(means.v_mean + offs_d)  # (BLOCK_D)
    scale = tl.load(means.v_scale + offs_d)  # (BLOCK_D)
    w0 = _scaled(w0, mean, scale, VMAX)
    if CONFIG.PV8:
        w1 = _scaled(w1, mean, scale, VMAX)
        w2 = _scaled(w2, mean, scale, VMAX)
        w3 = _scaled(w3, mean, scale, VMAX)
        _store_values_fp8(to.v8, to.v_residual, w0, w1, w2, w3, k_rows, BLOCK_N, BLOCK_D)
    else:
        at = to.v8 + tl.arange(0, BLOCK_N)[:, None] * BLOCK_D + offs_d[None, :]
        tl.store(at, w0.to(to.v8.dtype.element_ty))


@triton.jit
def store_block(to, k, v, strides, term, means, k_rows, CONFIG: tl.constexpr):
    """Quantise any block of keys and values; what is unseen or not finite is zero."""
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    v8 = to.v8
    # K and V: (BLOCK_N, BLOCK_D)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    live = (term != float("-inf"))[:, None] & (offs_d < HEAD_DIM)[None, :]
    k += offs_n.to(tl.int64)[:, None] * strides.k.row
    k += offs_d.to(tl.int64)[None, :] * strides.k.channel
    v += offs_n.to(tl.int64)[:, None] * strides.v.row
    v += offs_d.to(tl.int64)[None, :] * strides.v.channel
    x = tl.load(k, mask=live, other=0.0).to(tl.float32)
    w = tl.load(v, mask=live, other=0.0).to(tl.float32)
    # keys that are not finite
    whole = (tl.abs(x) < float("inf")) & (tl.abs(w) < float("inf"))
    bad = tl.max(tl.where(whole, 0, 1), 1) > 0
    live = live & (bad == 0)[:, None]
    tl.store(to.key_term + offs_n, tl.where(bad, float("nan"), term))
    # K without its mean: (BLOCK_D)
    if CONFIG.K_MEAN:
        x -= tl.load(means.k_mean + offs_d)[None, :]
    poisoned = tl.max(bad.to(tl.int32), 0) > 0
    x = tl.where(live, x, 0.0)
    _store_keys(to, x, poisoned, CONFIG)
    # V without its mean, in units of its scale: (BLOCK_D)
    w = tl.load(v, mask=live, other=0.0)  # again: two tiles would not fit
    mean = tl.load(means.v_mean + offs_d)
    scale = tl.load(means.v_scale + offs_d)
    w = tl.where(live, _scaled(w, mean, scale, CONFIG.VMAX), 0.0)
    w8 = w.to(v8.dtype.element_ty)
    if CONFIG.PV8:
        lost = tl.sum(_rounding_errors(w, v8.dtype.element_ty), 0)
        _add_lost(to.v_residual + offs_d, lost)
        w8 = _without_padding(w8, HEAD_DIM, BLOCK_D)
        w8 = w8.reshape([BLOCK_N // 16, 2, 4, 2, BLOCK_D]).permute(0, 2, 1, 3, 4)
        w8 = w8.reshape([BLOCK_N, BLOCK_D])
        tl.store(v8 + offs_d.to(tl.int64)[:, None] * k_rows + offs_n[None, :], tl.trans(w8))
    else:
        tl.store(v8 + offs_n[:, None] * BLOCK_D + offs_d[None, :], w8)
