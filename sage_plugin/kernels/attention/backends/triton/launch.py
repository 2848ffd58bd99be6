"""Launch code of the portable Triton variants: from a launch config to grids and arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention.backends.triton.flash_kernel import (
    PlainStrides,
    PlainTensors,
    plain_attention_kernel,
)
from sage_plugin.kernels.attention.backends.triton.loop_kernels import LoopConfig
from sage_plugin.kernels.attention.backends.triton.mask_blocks import MaskArguments
from sage_plugin.kernels.attention.backends.triton.quantized_kernel import (
    OperandScales,
    QuantizedConfig,
    QuantizedStrides,
    QuantizedTensors,
    quantized_attention_kernel,
)
from sage_plugin.kernels.attention.prologue.launch import QueryRows, quantized_pair
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.contract import (
    AttentionParams,
    OutputForm,
    PlainOperands,
    ReadsInPlace,
    bhsd,
)
from sage_plugin.kernels.launch_config import compiler_options
from sage_plugin.kernels.primitives import (
    SequenceEnds,
    Strides,
)
from sage_plugin.kernels.quantize.operands import QuantizedOperands, Sizes
from sage_plugin.kernels.quantize.recipe import LOG2E, Recipe
from sage_plugin.kernels.quantize.triton.launch import quantize
from sage_plugin.schema import LaunchConfig

P_TYPES = {
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}


class QuantizedPortable:
    """The portable variant of a kernel that quantises by a `Recipe`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        problem: AttentionParams,
        launch: LaunchConfig,
    ) -> QuantizedOperands:
        """Quantise on the current stream, in one Triton launch or two and one for counters."""
        launch = self.config_for(launch, problem, q.shape[-1])
        return quantize(q, k, v, problem=problem, launch=launch, recipe=self.recipe)

    def prepare_unmade(
        self,
        pair: QkPair,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        problem: AttentionParams,
        launch: LaunchConfig,
    ) -> QuantizedOperands:
        """Quantise Q as its norm and embedding are computed, and K that is made beside it.

        Q and K are `Unmade`, and `one_pass_reason` has nothing against it.
        """
        first = functools.partial(_prepared, pair)
        launch = self.config_for(launch, problem, q.shape[-1])
        return quantize(q, k, v, problem=problem, launch=launch, recipe=self.recipe, prologue=first)

    def config_for(
        self, launch: LaunchConfig, problem: AttentionParams, head_dim: int
    ) -> LaunchConfig:
        """Return the launch config that a call runs with, the one that it was given."""
        return launch

    def launch(
        self,
        operands: QuantizedOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch of attention on the quantised operands, two with a mask of rows and keys."""
        ops, config, recipe, problem = (
            operands,
            operands.launch_config,
            operands.recipe,
            operands.problem,
        )
        out = ops.form.empty(out_dtype or ops.v_dtype)
        view = bhsd(out, problem.layout)
        lse = ops.form.empty_lse() if return_lse else None
        row_blocks = -(-ops.seq_q // config.block_m)
        tma = config.loads == "descriptor"
        q8, k8, v8 = _descriptors(ops) if tma else (ops.q8, ops.k8, ops.v8)
        mask = MaskArguments.of(problem, seq_q=ops.seq_q, launch=config, terms_by_key=True)
        scales = OperandScales(
            ops.q_scale, ops.k_scale, ops.k_scale_finite, ops.key_term, ops.v_scale, ops.v_mean,
            ops.v_residual, ops.v_unit, ops.shift,
        )  # fmt: skip
        kernel_config = QuantizedConfig(
            HEAD_DIM=ops.head_dim, BLOCK_D=ops.k8.shape[-1], QK8=recipe.qk == "int8",
            PV8=recipe.pv == "fp8", P_TYPE=P_TYPES[recipe.pv_dtype], OFFSET=recipe.p_offset,
            TMA=tma, SHIFT=config.smooth_k, LSE=return_lse, **_constants(problem, config, mask),
        )  # fmt: skip
        tensors = QuantizedTensors(
            view, lse, scales, mask.tensors(), problem.sinks, _sequence_ends(problem)
        )
        launch_graph.launch(
            quantized_attention_kernel, row_blocks * ops.sequences * ops.heads_q,
            q8, k8, v8, tensors, QuantizedStrides(_strides(view), Strides(*mask.strides)),
            mask.planes, ops.heads_q, ops.heads_q // ops.heads_k, ops.seq_q, ops.seq_k,
            ops.q8.shape[1], ops.k8.shape[1], row_blocks, view.shape[2], problem.left,
            problem.right, problem.softcap * LOG2E, CONFIG=kernel_config,
            **compiler_options(config),
        )  # fmt: skip
        return out, lse


def _prepared(pair: QkPair, ops: QuantizedOperands) -> torch.Tensor:
    """Fill the operands of Q and return K, in the call's layout."""
    heads_first = (ops.sequences, ops.heads_q, ops.q8.shape[1])
    rows = QueryRows(
        ops.q8.view(*heads_first, ops.q8.shape[2]), ops.q_scale.view(heads_first),
        ops.problem.scale, ops.recipe.qk_max,
    )  # fmt: skip
    k = quantized_pair(pair, rows)
    return k.transpose(1, 2) if ops.problem.layout == "bhsd" else k


class PlainPortable(ReadsInPlace):
    """The portable variant of `fav2`: FlashAttention-2 without quantisation."""

    def launch(
        self,
        operands: PlainOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch, two with a mask of rows and keys; fp32 is multiplied in IEEE fp32."""
        ops, config, problem = operands, operands.config, operands.problem
        form = OutputForm.of(ops.q, problem.layout)
        out = form.empty(out_dtype or ops.v.dtype)
        q, k, v, o = (bhsd(t, problem.layout) for t in (ops.q, ops.k, ops.v, out))
        lse = form.empty_lse() if return_lse else None
        sizes = Sizes.of(q, k, problem, config)
        heads_q, head_dim = q.shape[1], q.shape[3]
        row_blocks = -(-sizes.seq_q // config.block_m)
        mask = MaskArguments.of(problem, seq_q=sizes.seq_q, launch=config, terms_by_key=False)
        tensors = PlainTensors(
            q, k, v, o, lse, mask.tensors(), problem.sinks, _sequence_ends(problem)
        )
        strides = PlainStrides(
            _strides(q), _strides(k), _strides(v), _strides(o), Strides(*mask.strides)
        )
        kernel_config = LoopConfig(
            HEAD_DIM=head_dim, BLOCK_D=max(16, 1 << (head_dim - 1).bit_length()), LSE=return_lse,
            **_constants(problem, config, mask),
        )  # fmt: skip
        launch_graph.launch(
            plain_attention_kernel, row_blocks * sizes.sequences * heads_q,
            tensors, strides, mask.planes, heads_q, heads_q // k.shape[1], sizes.seq_q,
            sizes.seq_k, row_blocks, q.shape[2], problem.left, problem.right,
            problem.scale * LOG2E, problem.softcap * LOG2E, CONFIG=kernel_config,
            **compiler_options(config),
        )  # fmt: skip
        return out, lse


def _constants(
    problem: AttentionParams, config: LaunchConfig, mask: MaskArguments
) -> dict[str, Any]:
    """What both kernels are compiled for."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "FLUSH": config.pv_flush,
        "MASK": mask.mode,
        "UNIT": mask.unit,
        "GROUP": mask.group,
        "LEFT": problem.left >= 0,
        "RIGHT": problem.right >= 0,
        "SOFTCAP": problem.softcap > 0.0,
        "SINKS": problem.sinks is not None,
        "PACKED": problem.packed is not None,
    }


def _strides(tensor: torch.Tensor) -> Strides:
    return Strides(*tensor.stride())


def _sequence_ends(problem: AttentionParams) -> SequenceEnds:
    packed = problem.packed
    if packed is None:
        return SequenceEnds(None, None)
    return SequenceEnds(packed.cu_seqlens_q, packed.cu_seqlens_k)


def _descriptors(ops: QuantizedOperands) -> tuple[Any, Any, Any]:
    """TMA descriptors of the quantised operands."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    config, width = ops.launch_config, ops.q8.shape[-1]
    q8, k8 = ops.q8.view(-1, width), ops.k8.view(-1, width)
    if ops.recipe.pv == "fp8":
        v8, v_block = ops.v8.view(-1, ops.v8.shape[-1]), [width, config.block_n]
    else:
        v8, v_block = ops.v8.view(-1, width), [config.block_n, width]
    return (
        TensorDescriptor.from_tensor(q8, [config.block_m, width]),
        TensorDescriptor.from_tensor(k8, [config.block_n, width]),
        TensorDescriptor.from_tensor(v8, v_block),
    )
