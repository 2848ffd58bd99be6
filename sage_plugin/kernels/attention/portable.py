"""Launch code of the portable Triton variants: from a launch config to grids and arguments."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sage_plugin.kernels.attention.primitives import (
    plain_attention_kernel,
    quantised_attention_kernel,
)
from sage_plugin.kernels.contract import (
    PlainOperands,
    Problem,
    ReadsInPlace,
    bhsd,
    empty_lse,
    empty_output,
)
from sage_plugin.kernels.quant.portable import QuantisedOperands, quantise
from sage_plugin.kernels.quant.recipe import LOG2E, Recipe
from sage_plugin.schema import LaunchConfig

P_TYPES = {
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}


class QuantisedPortable:
    """The portable variant of a kernel that quantises by a `Recipe`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        problem: Problem,
        launch: LaunchConfig,
    ) -> QuantisedOperands:
        """Quantise in four Triton launches on the current stream."""
        return quantise(q, k, v, problem=problem, launch=launch, recipe=self.recipe)

    def launch(
        self,
        operands: QuantisedOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch of attention on the quantised operands."""
        ops, config, recipe = operands, operands.launch_config, operands.recipe
        layout = ops.problem.layout
        out = empty_output(ops.q, out_dtype or ops.v_dtype)
        view = bhsd(out, layout)
        lse = empty_lse(ops.q, layout) if return_lse else ops.q_scale
        batch, heads_q, seq_q, _ = view.shape
        width = ops.k8.shape[-1]
        row_blocks = -(-seq_q // config.block_m)
        tma = config.loads == "descriptor"
        q8, k8, v8 = _descriptors(ops) if tma else (ops.q8, ops.k8, ops.v8)
        quantised_attention_kernel[(row_blocks * batch * heads_q,)](
            q8, k8, v8, view, lse, ops.q_scale, ops.k_scale, ops.v_scale, ops.v_mean, ops.shift,
            *view.stride(), heads_q, heads_q // ops.heads_k, seq_q, ops.seq_k, ops.q8.shape[1],
            ops.k8.shape[1], row_blocks, ops.k_scale.shape[1],
            D=ops.head_dim, DP=width, BM=config.block_m, BN=config.block_n, QK8=recipe.qk == "int8",
            PV8=recipe.pv == "fp8", P_TYPE=P_TYPES[recipe.pv_dtype], OFFSET=recipe.p_offset,
            FLUSH=config.pv_flush, TMA=tma, CAUSAL=ops.problem.causal, LSE=return_lse,
            SHIFT=config.smooth_k, STAGES=config.num_stages, **compiler_options(config),
        )  # fmt: skip
        return out, (lse if return_lse else None)


def _descriptors(ops: QuantisedOperands) -> tuple[Any, Any, Any]:
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


def compiler_options(config: LaunchConfig) -> dict[str, int]:
    """The fields of a launch config that are options of the compiler, set ones only."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    for name in ("maxnreg", "waves_per_eu", "matrix_instr_nonkdim"):
        if value := getattr(config, name):
            options[name] = value
    return options


class PlainPortable(ReadsInPlace):
    """The portable variant of `fav2`: FlashAttention-2 without quantisation."""

    def launch(
        self,
        operands: PlainOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch; fp32 inputs are multiplied in IEEE fp32."""
        ops, config, layout = operands, operands.config, operands.problem.layout
        out = empty_output(ops.q, out_dtype or ops.v.dtype)
        q, k, v, o = (bhsd(t, layout) for t in (ops.q, ops.k, ops.v, out))
        lse = empty_lse(ops.q, layout) if return_lse else out
        batch, heads_q, seq_q, head_dim = q.shape
        row_blocks = -(-seq_q // config.block_m)
        plain_attention_kernel[(row_blocks * batch * heads_q,)](
            q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            heads_q, heads_q // k.shape[1], seq_q, k.shape[2], row_blocks,
            ops.problem.scale * LOG2E,
            D=head_dim, DP=max(16, triton.next_power_of_2(head_dim)),
            BM=config.block_m, BN=config.block_n, FLUSH=config.pv_flush,
            CAUSAL=ops.problem.causal, LSE=return_lse, STAGES=config.num_stages,
            **compiler_options(config),
        )  # fmt: skip
        return out, (lse if return_lse else None)
