"""Quantisation of Q, K and V in Triton: one launch or two, after a small one that zeroes counters.

Shapes of the operands: Q `(B*Hq, q_rows, DP)`, K `(B*Hk, k_rows, DP)`, V `(B*Hk, k_rows, DP)` in
fp16 or transposed `(B*Hk, DP, k_rows)` in FP8. `DP` is the head dim padded with zeros to a power of
two; `q_rows` and `k_rows` are the lengths padded with zeros to whole blocks, or those of all packed
sequences, each from a block of its own. Inputs are read in place through their strides with 64-bit
offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.contract import AttentionParams, OutputForm, bhsd
from sage_plugin.kernels.primitives import SequenceEnds, Strides
from sage_plugin.kernels.quantize.operands import QuantizedOperands, Sizes, needs_shift
from sage_plugin.kernels.quantize.recipe import FP16_FLOOR, FP16_HEADROOM, LOG2E, TINY, Recipe
from sage_plugin.kernels.quantize.schedule import plan_of
from sage_plugin.kernels.quantize.triton.key_mask import KeyMask
from sage_plugin.kernels.quantize.triton.prepass_arguments import (
    HeadStatistics,
    KeyMaskStrides,
    PrepassConfig,
    PrepassOutputs,
    PrepassStrides,
    PrepassTensors,
)
from sage_plugin.kernels.quantize.triton.prepass_kernel import prepass_kernel
from sage_plugin.kernels.quantize.triton.reduce_kernels import COUNTERS
from sage_plugin.schema import LaunchConfig

REGISTERS, LAST_REGISTERS = 128, 80
"""Registers of a thread where inputs have 16 bits: sixteen warps then share an NVIDIA SM, of the
last of two launches twenty-four."""

LOADS_AT_ONCE = 4
"""Tiles of K, and of V, that a program that adds up has in flight."""

PART_TILE, FOLD_TILE = 8, 16
"""Values of a thread in such a tile, and in a tile of what was added up: the last program of a head
is waited for, and walks few tiles."""

AMD_WAVE = 64
"""Threads of the widest wave."""


def padded_head_dim(head_dim: int) -> int:
    """Channels of the quantised operands: the next power of two, at least 32 (one INT8 product)."""
    return max(32, 1 << (head_dim - 1).bit_length())


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    problem: AttentionParams,
    launch: LaunchConfig,
    recipe: Recipe,
    prologue: Callable[[QuantizedOperands], torch.Tensor] | None = None,
) -> QuantizedOperands:
    """Quantise Q, K and V by the blocks of `launch`; inputs are read in place, never written.

    With a `prologue`, which fills the operands of Q and returns K, those given tell shapes alone.
    """
    q4, k4, v4 = (bhsd(t, problem.layout) for t in (q, k, v))
    sizes = Sizes.of(q4, k4, problem, launch)
    heads_q, heads_k, head_dim = q4.shape[1], k4.shape[1], q4.shape[3]
    width = padded_head_dim(head_dim)
    new = functools.partial(launch_graph.empty, q.device)
    rows_q, rows_k = sizes.planes * heads_q, sizes.planes * heads_k
    pv8 = recipe.pv == "fp8"
    v_shape = (rows_k, width, sizes.k_rows) if pv8 else (rows_k, sizes.k_rows, width)
    heads = sizes.sequences * heads_k
    q_scale = new(torch.float32, rows_q, sizes.q_rows)
    k_blocks = sizes.k_rows // launch.block_n
    v_scale, v_mean, v_unit = new(torch.float32, 3, heads, width).unbind()
    k_mean = new(torch.float32, heads, width)
    operands = QuantizedOperands(
        q8=new(recipe.qk_dtype, rows_q, sizes.q_rows, width),
        k8=new(recipe.qk_dtype, rows_k, sizes.k_rows, width),
        v8=new(recipe.pv_dtype, *v_shape),
        q_scale=q_scale,
        k_scale=new(torch.float32, rows_k, k_blocks),
        k_scale_finite=new(torch.float32, rows_k, k_blocks),
        key_term=new(torch.float32, rows_k, sizes.k_rows),
        v_scale=v_scale,
        v_mean=v_mean,
        v_residual=new(torch.int32, heads, width),
        v_unit=v_unit,
        v_drifts=new(torch.int32, heads),
        shift=new(torch.float32, *q_scale.shape) if needs_shift(problem, launch) else None,
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
    if prologue is None:
        _launch(q4, k4, v4, operands, k_mean)
    else:
        _launch(None, bhsd(prologue(operands), problem.layout), v4, operands, k_mean)
    return operands


def _turns(launch: LaunchConfig) -> int:
    """Passes of sums and differences that a rotation takes: log2 of its block."""
    return max(launch.hadamard, 1).bit_length() - 1


def _is_wide(*inputs: torch.Tensor) -> bool:
    return any(t.element_size() > 2 for t in inputs)


def _launch(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: QuantizedOperands,
    k_mean: torch.Tensor,
) -> None:
    """Fill the operands, those of Q if it is given, after a small launch that zeroes counters."""
    ops, launch, recipe = operands, operands.launch_config, operands.recipe
    problem, packed = ops.problem, ops.problem.packed
    slots, width = k_mean.shape
    ratio = ops.heads_q // ops.heads_k
    plan = plan_of(
        slots, ratio, 0 if q is None else ops.seq_q, ops.seq_k, width,
        (launch.block_m, launch.block_n, launch.q_granule), ops.shift is not None,
    )  # fmt: skip
    count = slots * (plan.parts + plan.groups) * (4 * width + 16)
    # They are done with before a second launch makes V, whose place they take if they fit.
    place = ops.v8.view(torch.uint8).flatten()[: 4 * count]
    fits = len(plan.launches) > 1 and place.numel() == 4 * count
    records = (
        place.view(torch.float32) if fits else launch_graph.empty(v.device, torch.float32, count)
    )
    counters = launch_graph.zeros(v.device, torch.int32, slots, COUNTERS.value + plan.groups)
    key_mask = KeyMask.of(ops)
    pv8 = recipe.pv == "fp8"
    amd = torch.version.hip is not None
    limited = not (amd or launch.hadamard or _is_wide(k, v, *(() if q is None else (q,))))
    outputs = PrepassOutputs(
        ops.q8, ops.k8, ops.v8, ops.q_scale, ops.shift, ops.k_scale, ops.k_scale_finite,
        ops.key_term,
    )  # fmt: skip
    statistics = HeadStatistics(
        k_mean, ops.v_mean, ops.v_scale, ops.v_unit, ops.v_residual, ops.v_drifts, records, counters
    )
    ends = SequenceEnds(
        packed.cu_seqlens_q if packed else None, packed.cu_seqlens_k if packed else None
    )
    strides = PrepassStrides(
        Strides(*(k if q is None else q).stride()), Strides(*k.stride()), Strides(*v.stride()),
        KeyMaskStrides(*key_mask.strides),
    )  # fmt: skip
    tensors = PrepassTensors(q, k, v, outputs, statistics, key_mask.values, ends)
    for phase, programs, warps in plan.launches:
        threads = 32 * warps
        limit = {"maxnreg": LAST_REGISTERS if phase == 2 else REGISTERS} if limited else {}
        config = PrepassConfig(
            HEAD_DIM=ops.head_dim, BLOCK_D=width, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
            Q_ROWS=plan.q_tile, ROWS=PART_TILE * threads // width, DEPTH=LOADS_AT_ONCE,
            CHUNK=max(1, FOLD_TILE * threads // width), ARRIVALS=AMD_WAVE * warps if amd else 1,
            QK8=recipe.qk == "int8", QMAX=recipe.qk_max, TINY=TINY, PV8=pv8,
            VMAX=recipe.fp8_max if pv8 else 65504.0, LIMIT=recipe.fp8_max if pv8 else FP16_HEADROOM,
            FLOOR=FP16_FLOOR, K_MEAN=launch.smooth_k, V_MEAN=launch.smooth_v,
            MASKED=key_mask.values is not None, LEFT=problem.left >= 0, TURNS=_turns(launch),
            GRANULE=launch.q_granule, PACKED=packed is not None, SHIFT=ops.shift is not None,
            QUERIES=q is not None, PHASE=phase,
        )  # fmt: skip
        launch_graph.launch(
            prepass_kernel, programs,
            tensors, strides, ops.heads_k, ratio, ops.seq_q, ops.seq_k, problem.left,
            ops.q8.shape[1], ops.k8.shape[1], plan.parts, plan.groups, plan.group_parts,
            plan.part_keys, plan.q_blocks, plan.k_blocks, plan.lead, plan.ahead, slots,
            problem.scale * LOG2E, CONFIG=config, num_warps=warps, enable_fp_fusion=False,
            **limit,
        )  # fmt: skip
