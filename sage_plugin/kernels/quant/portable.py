"""Quantisation of Q, K and V in Triton: statistics of K and V, then one read of each operand.

Shapes of the operands: Q `(B*Hq, q_rows, DP)`, K `(B*Hk, k_rows, DP)`, V `(B*Hk, k_rows, DP)` in
fp16 or transposed `(B*Hk, DP, k_rows)` in FP8. `DP` is the head dim padded with zeros to a power of
two, `k_rows` the key length padded with zeros to whole blocks. Inputs are read in place through
their strides with 64-bit offsets. FP8 V stores its keys permuted inside groups of 16, in the order
in which P leaves the first product's registers, so that P needs no shuffle (SageAttention2, section
3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sage_plugin.kernels.contract import Problem, bhsd
from sage_plugin.kernels.quant.recipe import FP16_HEADROOM, LOG2E, TINY, Recipe
from sage_plugin.schema import LaunchConfig

STATISTICS_ROWS = 32
TARGET_PROGRAMS = 1056
Q_ROWS = 128
FEW_WARPS, MANY_WARPS = 4, 8
"""Warps of the passes over memory, which run at its speed with any of these."""


@triton.jit
def _round_even(x):
    """Nearest integer, ties to even, for |x| < 2^22; the same on a GPU and in the interpreter."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _magnitude(x):
    """|x|, infinite for NaN: the scale of its granule then carries it to every score."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _to_granule(x, amax, QMAX: tl.constexpr, QK8: tl.constexpr):
    """Values on the grid of INT8 or in the range of FP8; 0 where the granule is not finite."""
    y = x * (QMAX / amax)
    y = tl.where(y == y, y, 0.0)
    if QK8:
        return _round_even(y)
    return tl.minimum(tl.maximum(y, -QMAX), QMAX)


@triton.jit(do_not_specialize=["heads", "seq", "per_split", "splits"])
def _statistics_kernel(
    k, v, k_sum, v_sum, v_min, v_max,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    heads, seq, per_split, splits,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, K_MEAN: tl.constexpr,
):  # fmt: skip
    """Partial sums of K, and sums and extremes of V, of one split of one head."""
    split = (tl.program_id(0) % splits).to(tl.int64)
    bh = (tl.program_id(0) // splits).to(tl.int64)
    b, h = bh // heads, bh % heads
    d = tl.arange(0, DP)
    row = tl.arange(0, ROWS)
    k_head = k + b * stride_kb + h * stride_kh + d.to(tl.int64)[None, :] * stride_kd
    v_head = v + b * stride_vb + h * stride_vh + d.to(tl.int64)[None, :] * stride_vd
    sums_k = tl.zeros([ROWS, DP], tl.float32)
    sums_v = tl.zeros([ROWS, DP], tl.float32)
    low = tl.full([ROWS, DP], float("inf"), tl.float32)
    high = tl.full([ROWS, DP], float("-inf"), tl.float32)
    first = split * per_split
    for start in range(first, tl.minimum(first + per_split, seq), ROWS):
        n = (start + row).to(tl.int64)
        live = (n < seq)[:, None] & (d < D)[None, :]
        x = tl.load(v_head + n[:, None] * stride_vs, mask=live, other=0.0).to(tl.float32)
        sums_v += x
        low = tl.minimum(low, tl.where(live, x, float("inf")))
        high = tl.maximum(high, tl.where(live, x, float("-inf")))
        if K_MEAN:
            y = tl.load(k_head + n[:, None] * stride_ks, mask=live, other=0.0)
            sums_k += y.to(tl.float32)
    at = (bh * splits + split) * DP + d
    tl.store(v_sum + at, tl.sum(sums_v, 0))
    tl.store(v_min + at, tl.min(low, 0))
    tl.store(v_max + at, tl.max(high, 0))
    if K_MEAN:
        tl.store(k_sum + at, tl.sum(sums_k, 0))


@triton.jit(do_not_specialize=["seq", "splits"])
def _reduce_kernel(
    k_sum, v_sum, v_min, v_max, k_mean, v_mean, v_scale, seq, splits,
    D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, K_MEAN: tl.constexpr,
    V_MEAN: tl.constexpr, PV8: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Partial statistics of one head to the mean of K, and the mean and scale of V."""
    bh = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    part = tl.arange(0, SPLITS)
    live = (part < splits)[:, None] & (d < D)[None, :]
    at = (bh * splits + part)[:, None] * DP + d[None, :]
    mean = tl.zeros([DP], tl.float32)
    if V_MEAN:
        mean = tl.sum(tl.load(v_sum + at, mask=live, other=0.0), 0) / seq
    low = tl.min(tl.load(v_min + at, mask=live, other=float("inf")), 0)
    high = tl.max(tl.load(v_max + at, mask=live, other=float("-inf")), 0)
    amax = tl.where(d < D, tl.maximum(tl.abs(high - mean), tl.abs(low - mean)), 0.0)
    if PV8:
        scale = tl.maximum(amax, TINY) / LIMIT
    else:
        scale = tl.maximum(amax / LIMIT, 1.0)
    tl.store(v_mean + bh * DP + d, mean)
    tl.store(v_scale + bh * DP + d, scale)
    if K_MEAN:
        sums = tl.sum(tl.load(k_sum + at, mask=live, other=0.0), 0)
        tl.store(k_mean + bh * DP + d, sums / seq)


@triton.jit(do_not_specialize=["heads", "ratio", "seq", "q_rows", "blocks"])
def _quantise_q_kernel(
    q, q8, q_scale, shift, k_mean, stride_qb, stride_qh, stride_qs, stride_qd,
    heads, ratio, seq, q_rows, blocks, multiplier,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, QK8: tl.constexpr, QMAX: tl.constexpr,
    TINY: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One block of queries: scale folded in, one quantisation scale a row, and q . mean(K)."""
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    d = tl.arange(0, DP)
    n = ((tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = (n < seq)[:, None] & (d < D)[None, :]
    at = (
        q
        + b * stride_qb
        + h * stride_qh
        + n[:, None] * stride_qs
        + d.to(tl.int64)[None, :] * stride_qd
    )
    x = tl.load(at, mask=live, other=0.0).to(tl.float32) * multiplier
    amax = tl.maximum(tl.max(_magnitude(x), 1), TINY)
    y = _to_granule(x, amax[:, None], QMAX, QK8)
    rows = bh * q_rows + n
    tl.store(
        q8 + rows[:, None] * DP + d[None, :], y.to(q8.dtype.element_ty), mask=(n < q_rows)[:, None]
    )
    tl.store(q_scale + rows, amax / QMAX, mask=n < q_rows)
    if SHIFT:
        mean = tl.load(k_mean + (b * (heads // ratio) + h // ratio) * DP + d)
        tl.store(shift + rows, tl.sum(x * mean[None, :], 1), mask=n < q_rows)


@triton.jit(do_not_specialize=["heads", "seq", "blocks"])
def _quantise_kv_kernel(
    k, v, k8, v8, k_scale, k_mean, v_mean, v_scale,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    heads, seq, k_rows, blocks,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, QK8: tl.constexpr, QMAX: tl.constexpr,
    TINY: tl.constexpr, PV8: tl.constexpr, VMAX: tl.constexpr, K_MEAN: tl.constexpr,
):  # fmt: skip
    """One block of keys and values; rows past the end and channels past the head dim are zero."""
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    b, h = bh // heads, bh % heads
    d = tl.arange(0, DP)
    n = (block * BN + tl.arange(0, BN)).to(tl.int64)
    live = (n < seq)[:, None] & (d < D)[None, :]
    at = (
        k
        + b * stride_kb
        + h * stride_kh
        + n[:, None] * stride_ks
        + d.to(tl.int64)[None, :] * stride_kd
    )
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    if K_MEAN:
        x = tl.where(live, x - tl.load(k_mean + bh * DP + d)[None, :], 0.0)
    amax = tl.maximum(tl.max(tl.max(_magnitude(x), 1), 0), TINY)
    y = _to_granule(x, amax, QMAX, QK8)
    rows = bh * k_rows + n
    tl.store(k8 + rows[:, None] * DP + d[None, :], y.to(k8.dtype.element_ty))
    tl.store(k_scale + bh * blocks + block, amax / QMAX)

    at = (
        v
        + b * stride_vb
        + h * stride_vh
        + n[:, None] * stride_vs
        + d.to(tl.int64)[None, :] * stride_vd
    )
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    mean = tl.load(v_mean + bh * DP + d)[None, :]
    x = tl.where(live, (x - mean) / tl.load(v_scale + bh * DP + d)[None, :], 0.0)
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -VMAX), VMAX), x)  # a clamp alone loses NaN
    w = x.to(v8.dtype.element_ty)
    if PV8:
        w = w.reshape([BN // 16, 2, 4, 2, DP]).permute(0, 2, 1, 3, 4).reshape([BN, DP])
        cols = block.to(tl.int64) * BN + tl.arange(0, BN)
        tl.store(v8 + (bh * DP + d[:, None]) * k_rows + cols[None, :], tl.trans(w))
    else:
        tl.store(v8 + rows[:, None] * DP + d[None, :], w)


@dataclass(frozen=True, slots=True)
class QuantisedOperands:
    """Quantised Q, K and V on a GPU, with the blocks that they were quantised by.

    Attributes:
        q8: `(B*Hq, q_rows, DP)`.
        k8: `(B*Hk, k_rows, DP)`.
        v8: `(B*Hk, k_rows, DP)` fp16 or `(B*Hk, DP, k_rows)` FP8.
        q_scale: `(B*Hq, q_rows)` fp32.
        k_scale: `(B*Hk, k_rows / block_n)` fp32.
        v_scale: `(B*Hk, DP)` fp32; v_mean likewise.
        v_mean: what was subtracted from V.
        shift: `(B*Hq, q_rows)` fp32, q . mean(K) in log2 units, read for the LSE only.
        q: the caller's Q, for the shape and memory order of the output.
    """

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    v_mean: torch.Tensor
    shift: torch.Tensor
    q: torch.Tensor
    heads_k: int
    seq_k: int
    head_dim: int
    v_dtype: torch.dtype
    problem: Problem
    recipe: Recipe
    launch_config: LaunchConfig


def padded_head_dim(head_dim: int) -> int:
    """Channels of the quantised operands: the next power of two, at least 32 (one INT8 product)."""
    return max(32, triton.next_power_of_2(head_dim))


def quantise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    problem: Problem,
    launch: LaunchConfig,
    recipe: Recipe,
) -> QuantisedOperands:
    """Quantise Q, K and V by the blocks of `launch`; inputs are read in place, never written."""
    q4, k4, v4 = (bhsd(t, problem.layout) for t in (q, k, v))
    batch, heads_q, seq_q, head_dim = q4.shape
    heads_k, seq_k = k4.shape[1], k4.shape[2]
    width = padded_head_dim(head_dim)
    q_rows = -(-seq_q // launch.block_m) * launch.block_m
    blocks = -(-seq_k // launch.block_n)
    k_rows = blocks * launch.block_n
    new = _Allocator(q.device)
    pv8 = recipe.pv == "fp8"
    v_shape = (batch * heads_k, width, k_rows) if pv8 else (batch * heads_k, k_rows, width)
    operands = QuantisedOperands(
        q8=new(recipe.qk_dtype, batch * heads_q, q_rows, width),
        k8=new(recipe.qk_dtype, batch * heads_k, k_rows, width),
        v8=new(recipe.pv_dtype, *v_shape),
        q_scale=new(torch.float32, batch * heads_q, q_rows),
        k_scale=new(torch.float32, batch * heads_k, blocks),
        v_scale=new(torch.float32, batch * heads_k, width),
        v_mean=new(torch.float32, batch * heads_k, width),
        shift=new(torch.float32, batch * heads_q, q_rows),
        q=q,
        heads_k=heads_k,
        seq_k=seq_k,
        head_dim=head_dim,
        v_dtype=v.dtype,
        problem=problem,
        recipe=recipe,
        launch_config=launch,
    )
    k_mean = _statistics(k4, v4, operands, new)
    _quantise_q(q4, operands, k_mean)
    _quantise_kv(k4, v4, operands, k_mean)
    return operands


class _Allocator:
    """Uninitialised scratch on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _statistics(
    k: torch.Tensor, v: torch.Tensor, operands: QuantisedOperands, new: _Allocator
) -> torch.Tensor:
    """Fill the mean and scale of V, and return the mean of K (unwritten without smoothing)."""
    recipe, launch = operands.recipe, operands.launch_config
    heads, width = k.shape[0] * k.shape[1], operands.k8.shape[-1]
    seq = operands.seq_k
    splits = max(1, min(128, TARGET_PROGRAMS // heads, -(-seq // STATISTICS_ROWS)))
    per_split = -(-seq // (splits * STATISTICS_ROWS)) * STATISTICS_ROWS
    k_sum, v_sum, v_min, v_max = (new(torch.float32, heads, splits, width) for _ in range(4))
    k_mean = new(torch.float32, heads, width)
    _statistics_kernel[(heads * splits,)](
        k, v, k_sum, v_sum, v_min, v_max, *k.stride(), *v.stride(),
        k.shape[1], seq, per_split, splits,
        D=operands.head_dim, DP=width, ROWS=STATISTICS_ROWS, K_MEAN=launch.smooth_k,
        num_warps=FEW_WARPS,
    )  # fmt: skip
    _reduce_kernel[(heads,)](
        k_sum, v_sum, v_min, v_max, k_mean, operands.v_mean, operands.v_scale, seq, splits,
        D=operands.head_dim, DP=width, SPLITS=triton.next_power_of_2(splits),
        K_MEAN=launch.smooth_k, V_MEAN=launch.smooth_v, PV8=recipe.pv == "fp8",
        LIMIT=recipe.fp8_max if recipe.pv == "fp8" else FP16_HEADROOM, TINY=TINY,
        num_warps=FEW_WARPS,
    )  # fmt: skip
    return k_mean


def _quantise_q(q: torch.Tensor, operands: QuantisedOperands, k_mean: torch.Tensor) -> None:
    recipe = operands.recipe
    q_rows, width = operands.q8.shape[1:]
    blocks = -(-q_rows // Q_ROWS)
    _quantise_q_kernel[(blocks * q.shape[0] * q.shape[1],)](
        q, operands.q8, operands.q_scale, operands.shift, k_mean, *q.stride(),
        q.shape[1], q.shape[1] // operands.heads_k, q.shape[2], q_rows, blocks,
        operands.problem.scale * LOG2E,
        D=operands.head_dim, DP=width, ROWS=Q_ROWS, QK8=recipe.qk == "int8",
        QMAX=recipe.qk_max, TINY=TINY, SHIFT=operands.launch_config.smooth_k, num_warps=MANY_WARPS,
    )  # fmt: skip


def _quantise_kv(
    k: torch.Tensor, v: torch.Tensor, operands: QuantisedOperands, k_mean: torch.Tensor
) -> None:
    recipe, launch = operands.recipe, operands.launch_config
    k_rows, width = operands.k8.shape[1:]
    blocks = operands.k_scale.shape[1]
    _quantise_kv_kernel[(blocks * k.shape[0] * k.shape[1],)](
        k, v, operands.k8, operands.v8, operands.k_scale, k_mean, operands.v_mean, operands.v_scale,
        *k.stride(), *v.stride(), k.shape[1], operands.seq_k, k_rows, blocks,
        D=operands.head_dim, DP=width, BN=launch.block_n, QK8=recipe.qk == "int8",
        QMAX=recipe.qk_max, TINY=TINY, PV8=recipe.pv == "fp8",
        VMAX=recipe.fp8_max if recipe.pv == "fp8" else 65504.0, K_MEAN=launch.smooth_k,
        num_warps=MANY_WARPS if launch.block_n * width > 4096 else FEW_WARPS,
    )  # fmt: skip
