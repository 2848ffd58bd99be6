"""Launch code of the Hopper variants: the portable pre-pass, and attention in Gluon."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sage_plugin import device as devices
from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention.backends.hopper.attention_kernel import hopper_attention_kernel
from sage_plugin.kernels.attention.backends.hopper.combine_kernel import combine_kernel
from sage_plugin.kernels.attention.backends.hopper.config import AttentionConfig, CombineConfig
from sage_plugin.kernels.attention.backends.hopper.gluon_compat import TensorDescriptor, gl
from sage_plugin.kernels.attention.backends.hopper.scheduler import (
    StreamKSplit,
    stream_k,
    tile_each,
)
from sage_plugin.kernels.attention.backends.triton.launch import QuantizedPortable
from sage_plugin.kernels.contract import bhsd
from sage_plugin.kernels.quantize.operands import QuantizedOperands

GROUP_ROWS = 64
"""Query rows of a warpgroup."""

GROUP_WARPS = 4

REGISTERS = {2: 240, 3: 160}
"""Registers of a thread that multiplies, by warpgroups; an SM has 65,536 for them and the loads."""

COMBINED_VALUES = 2048
"""Outputs of a program that combines the pieces of split tiles."""

DELAYED_ABOVE = 64
"""Channels above which `overlap` of fp16 values runs P V a step late; else scores start early."""

_GLUON_TYPES = {
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
}


class QuantizedHopper(QuantizedPortable):
    """The Hopper variant of a kernel that quantises by a `Recipe`.

    It takes causal calls, biases and padding by key, grouped heads and any lengths; the decision
    table leaves windows, caps, sinks, packed sequences and masks of tiles to the portable variant.
    """

    def launch(
        self,
        operands: QuantizedOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch of attention on the quantised operands, and one that combines split tiles."""
        ops, config, problem = operands, operands.launch_config, operands.problem
        out = ops.form.empty(out_dtype or ops.v_dtype)
        view = bhsd(out, problem.layout)
        lse = ops.form.empty_lse() if return_lse else None
        row_blocks = -(-ops.seq_q // config.block_m)
        groups, pv8 = config.block_m // GROUP_ROWS, self.recipe.pv == "fp8"
        delayed = config.overlap and not pv8 and ops.k8.shape[-1] > DELAYED_ABOVE
        split = _split_of(ops, out.device)
        outs, sums = _pieces(split, config.block_m, ops)
        constants = AttentionConfig(
            HEAD_DIM=ops.head_dim, PADDED_DIM=ops.k8.shape[-1], BLOCK_N=config.block_n,
            GROUPS=groups, STAGES=config.num_stages, QK8=self.recipe.qk == "int8", PV8=pv8,
            LINEAR=config.exp_linear * config.block_n // 128, FLUSH=config.pv_flush,
            EARLY=int(config.overlap and not delayed), DELAYED=int(delayed),
            TERM=problem.mask is not None, CAUSAL=problem.right >= 0, LSE=return_lse,
            SHIFT=config.smooth_k, SPLIT=split.cut > 0,
            REGISTERS=config.maxnreg or REGISTERS[groups],
        )  # fmt: skip
        launch_graph.launch(
            hopper_attention_kernel, split.programs,
            *_descriptors(ops), (view, lse),
            (ops.q_scale, ops.k_scale, ops.k_scale_finite, ops.key_term, ops.v_scale, ops.v_mean,
             ops.v_residual, ops.v_unit, ops.v_drifts, ops.shift),
            (outs, sums), view.stride(), ops.heads_q, ops.heads_q // ops.heads_k, ops.seq_q,
            ops.seq_k, ops.q8.shape[1], ops.k8.shape[1], row_blocks,
            *split[1:], view.shape[2], CONFIG=constants, num_warps=GROUP_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
        if outs is not None:
            rows = COMBINED_VALUES // outs.shape[-1]
            launch_graph.launch(
                combine_kernel, split.cut * config.block_m // rows,
                view, lse, ops.shift, outs, sums, view.stride(), ops.heads_q, ops.seq_q,
                ops.q8.shape[1], row_blocks, split.whole, split.blocks, split.share,
                view.shape[2],
                CONFIG=CombineConfig(
                    HEAD_DIM=ops.head_dim, PADDED_DIM=outs.shape[-1], BLOCK_M=config.block_m,
                    ROWS=rows, LSE=return_lse, SHIFT=config.smooth_k,
                ),
                num_warps=GROUP_WARPS, enable_fp_fusion=True,
            )  # fmt: skip
        return out, lse


def _split_of(ops: QuantizedOperands, device: torch.device) -> StreamKSplit:
    """Who walks what; causal tiles, which differ in length, have a program each."""
    config = ops.launch_config
    tiles = -(-ops.seq_q // config.block_m) * ops.sequences * ops.heads_q
    blocks = -(-ops.seq_k // config.block_n)
    if config.persistent and ops.problem.right < 0:
        return stream_k(tiles, blocks, devices.facts(device).sm_count)
    return tile_each(tiles, blocks)


def _pieces(
    split: StreamKSplit, block_m: int, ops: QuantizedOperands
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scratch for what pieces of tiles leave: fp32 outputs, and log2 of their rows' sums."""
    if not split.cut:
        return None, None
    new = functools.partial(launch_graph.empty, ops.q8.device, torch.float32)
    return (
        new(split.pieces, block_m, ops.k8.shape[-1]),
        new(split.pieces, block_m),
    )


def _descriptors(ops: QuantizedOperands) -> tuple[Any, Any, Any]:
    """TMA descriptors of Q by a warpgroup's rows, and of K and V by blocks of keys."""
    width, block_n = ops.q8.shape[-1], ops.launch_config.block_n
    transposed = ops.recipe.pv == "fp8"
    return (
        _descriptor(ops.q8.view(-1, width), [GROUP_ROWS, width]),
        _descriptor(ops.k8.view(-1, width), [block_n, width]),
        _descriptor(
            ops.v8.view(-1, ops.v8.shape[-1]),
            [width, block_n] if transposed else [block_n, width],
        ),
    )


def _descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    return TensorDescriptor.from_tensor(tensor, block, _layout(*block, tensor.dtype))


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """The order of a tile in shared memory, which follows from its size and type."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _GLUON_TYPES[dtype])
