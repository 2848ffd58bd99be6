"""Quantisation of Q, K and V in Triton: statistics of K and V, then one read of each operand.

Shapes of the operands: Q `(B*Hq, q_rows, DP)`, K `(B*Hk, k_rows, DP)`, V `(B*Hk, k_rows, DP)` in
fp16 or transposed `(B*Hk, DP, k_rows)` in FP8. `DP` is the head dim padded with zeros to a power of
two; `q_rows` and `k_rows` are the lengths padded with zeros to whole blocks, or those of all packed
sequences, each from a block of its own. Inputs are read in place through their strides with 64-bit
offsets.
"""

from __future__ import annotations

import torch
import triton

from sage_plugin.kernels.contract import OutputForm, Problem, bhsd
from sage_plugin.kernels.quant.granule_kernels import quantise_kv_kernel, quantise_q_kernel
from sage_plugin.kernels.quant.key_mask import KeyMask
from sage_plugin.kernels.quant.operands import QuantisedOperands, Sizes
from sage_plugin.kernels.quant.recipe import FP16_FLOOR, FP16_HEADROOM, LOG2E, TINY, Recipe
from sage_plugin.kernels.quant.statistics_kernels import reduce_kernel, statistics_kernel
from sage_plugin.schema import LaunchConfig

STATISTICS_ROWS = 32
TARGET_PROGRAMS = 1056
Q_ROWS = 128
FEW_WARPS, MANY_WARPS = 4, 8
"""Warps of the passes over memory, which run at its speed with any of these."""


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
    sizes = Sizes.of(q4, k4, problem, launch)
    heads_q, heads_k, head_dim = q4.shape[1], k4.shape[1], q4.shape[3]
    width = padded_head_dim(head_dim)
    new = _Allocator(q.device)
    rows_q, rows_k = sizes.planes * heads_q, sizes.planes * heads_k
    pv8 = recipe.pv == "fp8"
    v_shape = (rows_k, width, sizes.k_rows) if pv8 else (rows_k, sizes.k_rows, width)
    operands = QuantisedOperands(
        q8=new(recipe.qk_dtype, rows_q, sizes.q_rows, width),
        k8=new(recipe.qk_dtype, rows_k, sizes.k_rows, width),
        v8=new(recipe.pv_dtype, *v_shape),
        q_scale=new(torch.float32, rows_q, sizes.q_rows),
        k_scale=new(torch.float32, rows_k, sizes.k_rows // launch.block_n),
        k_scale_finite=new(torch.float32, rows_k, sizes.k_rows // launch.block_n),
        key_term=new(torch.float32, rows_k, sizes.k_rows),
        v_scale=new(torch.float32, sizes.sequences * heads_k, width),
        v_mean=new(torch.float32, sizes.sequences * heads_k, width),
        v_residual=new(torch.int32, sizes.sequences * heads_k, width),
        v_unit=new(torch.float32, sizes.sequences * heads_k, width),
        shift=new(torch.float32, rows_q, sizes.q_rows),
        form=OutputForm.of(q, problem.layout),
        heads_q=heads_q,
        heads_k=heads_k,
        sequences=sizes.sequences,
        seq_q=sizes.seq_q,
        seq_k=sizes.seq_k,
        head_dim=head_dim,
        v_dtype=v.dtype,
        problem=problem,
        recipe=recipe,
        launch_config=launch,
    )
    key_mask = KeyMask.of(operands)
    k_mean = _statistics(k4, v4, operands, key_mask)
    _quantise_q(q4, operands, k_mean)
    _quantise_kv(k4, v4, operands, k_mean, key_mask)
    return operands


class _Allocator:
    """Uninitialised scratch on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _turns(launch: LaunchConfig) -> int:
    """Passes of sums and differences that a rotation takes: log2 of its block."""
    return max(launch.hadamard, 1).bit_length() - 1


def _statistics(
    k: torch.Tensor, v: torch.Tensor, operands: QuantisedOperands, key_mask: KeyMask
) -> torch.Tensor:
    """Fill the mean and scale of V, and return the mean of K (unwritten without smoothing)."""
    recipe, launch = operands.recipe, operands.launch_config
    new = _Allocator(k.device)
    heads, width = operands.v_scale.shape
    seq, masked = operands.seq_k, key_mask.values is not None
    splits = max(1, min(128, TARGET_PROGRAMS // heads, -(-seq // STATISTICS_ROWS)))
    per_split = -(-seq // (splits * STATISTICS_ROWS)) * STATISTICS_ROWS
    k_sum, v_sum, v_min, v_max = (new(torch.float32, heads, splits, width) for _ in range(4))
    left = operands.problem.left
    alive = new(torch.float32, heads, splits)
    k_mean = new(torch.float32, heads, width)
    packed = operands.problem.packed
    warps = MANY_WARPS if width > 128 else FEW_WARPS
    statistics_kernel[(heads * splits,)](
        k, v, k_sum, v_sum, v_min, v_max, alive, key_mask.values,
        packed.cu_seqlens_q if packed else None, packed.cu_seqlens_k if packed else None,
        *k.stride(), *v.stride(), *key_mask.strides,
        operands.heads_k, operands.seq_q, seq, left, per_split, splits,
        D=operands.head_dim, DP=width, ROWS=STATISTICS_ROWS, K_MEAN=launch.smooth_k,
        MASKED=masked, LEFT=left >= 0, PACKED=packed is not None, num_warps=warps,
    )  # fmt: skip
    reduce_kernel[(heads,)](
        k_sum, v_sum, v_min, v_max, alive, k_mean, operands.v_mean, operands.v_scale,
        operands.v_residual, operands.v_unit, splits,
        D=operands.head_dim, DP=width, SPLITS=triton.next_power_of_2(splits),
        K_MEAN=launch.smooth_k, V_MEAN=launch.smooth_v, PV8=recipe.pv == "fp8",
        LIMIT=recipe.fp8_max if recipe.pv == "fp8" else FP16_HEADROOM, FLOOR=FP16_FLOOR,
        TINY=TINY,
        num_warps=FEW_WARPS,
    )  # fmt: skip
    return k_mean


def _quantise_q(q: torch.Tensor, operands: QuantisedOperands, k_mean: torch.Tensor) -> None:
    recipe, launch, packed = operands.recipe, operands.launch_config, operands.problem.packed
    q_rows, width = operands.q8.shape[1:]
    longest = -(-operands.seq_q // launch.block_m) * launch.block_m
    blocks = -(-longest // Q_ROWS)
    quantise_q_kernel[(blocks * operands.sequences * operands.heads_q,)](
        q, operands.q8, operands.q_scale, operands.shift, k_mean,
        packed.cu_seqlens_q if packed else None, *q.stride(),
        operands.heads_q, operands.heads_q // operands.heads_k, operands.seq_q, q_rows, blocks,
        operands.problem.scale * LOG2E,
        D=operands.head_dim, DP=width, ROWS=Q_ROWS, BM=launch.block_m, QK8=recipe.qk == "int8",
        QMAX=recipe.qk_max, TINY=TINY, SHIFT=launch.smooth_k,
        TURNS=_turns(launch),
        GRANULE=launch.q_granule, PACKED=packed is not None,
        num_warps=MANY_WARPS,
    )  # fmt: skip


def _quantise_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    operands: QuantisedOperands,
    k_mean: torch.Tensor,
    key_mask: KeyMask,
) -> None:
    recipe, launch, packed = operands.recipe, operands.launch_config, operands.problem.packed
    k_rows, width = operands.k8.shape[1:]
    blocks = -(-operands.seq_k // launch.block_n)
    quantise_kv_kernel[(blocks * operands.sequences * operands.heads_k,)](
        k, v, operands.k8, operands.v8, operands.k_scale, operands.k_scale_finite,
        operands.key_term, k_mean, operands.v_mean, operands.v_scale, operands.v_residual,
        key_mask.values,
        packed.cu_seqlens_q if packed else None, packed.cu_seqlens_k if packed else None,
        *k.stride(), *v.stride(), *key_mask.strides, operands.heads_k, operands.seq_q,
        operands.seq_k, operands.problem.left, k_rows, blocks,
        D=operands.head_dim, DP=width, BN=launch.block_n, QK8=recipe.qk == "int8",
        QMAX=recipe.qk_max, TINY=TINY, PV8=recipe.pv == "fp8",
        VMAX=recipe.fp8_max if recipe.pv == "fp8" else 65504.0, K_MEAN=launch.smooth_k,
        MASKED=key_mask.values is not None, LEFT=operands.problem.left >= 0,
        TURNS=_turns(launch), PACKED=packed is not None,
        num_warps=MANY_WARPS if launch.block_n * width > 4096 else FEW_WARPS,
    )  # fmt: skip
