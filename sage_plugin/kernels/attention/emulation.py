"""Exact emulation of blockwise attention in torch: every kernel's maths, a key block at a time.

It follows the kernels step by step (running maximum, rounding of P to its type, one fp32 partial
product a block), so what it differs by from the oracle is quantisation, and what a GPU variant
differs by from it is a bug or the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sage_plugin.kernels.contract import Problem, bhsd, empty_output
from sage_plugin.kernels.quant.recipe import LOG2E, Recipe
from sage_plugin.kernels.quant.reference import (
    QuantisedK,
    QuantisedQ,
    QuantisedV,
    quantise_k,
    quantise_q,
    quantise_v,
    round_to,
)
from sage_plugin.schema import LaunchConfig

Block = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class EmulatedOperands:
    """Quantised operands, and what the epilogue needs of the originals."""

    quantised_q: QuantisedQ
    quantised_k: QuantisedK
    quantised_v: QuantisedV
    q: torch.Tensor
    seq_k: int
    v_dtype: torch.dtype
    problem: Problem
    launch_config: LaunchConfig


class QuantisedEmulation:
    """The emulation of a kernel that quantises by a `Recipe`."""

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
    ) -> EmulatedOperands:
        """Quantise with the torch twins, by the blocks of `launch`."""
        qs, ks, vs = (bhsd(t, problem.layout) for t in (q, k, v))
        block_n = launch.block_n
        return EmulatedOperands(
            quantise_q(qs, scale=problem.scale, recipe=self.recipe),
            quantise_k(ks, block_n=block_n, smooth=launch.smooth_k, recipe=self.recipe),
            quantise_v(vs, block_n=block_n, smooth=launch.smooth_v, recipe=self.recipe),
            q,
            ks.shape[2],
            v.dtype,
            problem,
            launch,
        )

    def launch(
        self,
        operands: EmulatedOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blockwise attention on the quantised operands."""
        ops, problem = operands, operands.problem
        queries, keys, values = ops.quantised_q, ops.quantised_k, ops.quantised_v
        batch, heads_q, seq_q, head_dim = queries.values.shape
        heads_k = keys.values.shape[1]
        rows = queries.values.float().reshape(batch, heads_k, -1, head_dim)
        row_scale = queries.scale.reshape(batch, heads_k, -1)

        def scores(j: int) -> torch.Tensor:
            exact = rows @ keys.values[:, :, j].float().transpose(-1, -2)
            return exact * (row_scale * keys.scale[:, :, j, None])[..., None]

        acc, norm, top = blockwise(
            scores,
            lambda j: values.values[:, :, j].float(),
            blocks=keys.values.shape[2],
            block_n=ops.launch_config.block_n,
            seq_q=seq_q,
            seq_k=ops.seq_k,
            causal=problem.causal,
            p_dtype=self.recipe.pv_dtype,
            p_offset=self.recipe.p_offset,
        )
        out = acc / norm[..., None] * values.scale[:, :, None] + values.mean[:, :, None]
        out = torch.where(norm[..., None] != 0, out, 0.0)
        result = _in_layout(
            out.view(batch, heads_q, seq_q, -1), ops.q, ops.v_dtype, out_dtype, problem
        )
        if not return_lse:
            return result, None
        lse = (torch.log2(norm) - self.recipe.p_offset + top) / LOG2E
        q = bhsd(ops.q, problem.layout).float().reshape(batch, heads_k, -1, head_dim)
        lse = lse + (q @ keys.mean[..., None])[..., 0] * problem.scale
        return result, lse.view(batch, heads_q, seq_q).contiguous()


def blockwise(
    scores: Block,
    values: Block,
    *,
    blocks: int,
    block_n: int,
    seq_q: int,
    seq_k: int,
    causal: bool,
    p_dtype: torch.dtype,
    p_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Online softmax over key blocks, as the kernels do it (FlashAttention-2, arXiv 2307.08691).

    Args:
        scores: block index -> `(B, Hk, G*Sq, block_n)` scores in log2 units, padding included.
        values: block index -> `(B, Hk, block_n, Dv)` fp32 values.
        blocks: number of key blocks.
        block_n: keys of a block.
        seq_q: query length; rows are G groups of it.
        seq_k: key length.
        causal: bottom-right aligned causal mask.
        p_dtype: type that P is rounded to before the second product.
        p_offset: log2 of the value that a row's largest P is stored as.

    Returns:
        Unnormalised output, row sums (0 for rows without a visible key) and row maxima, the last
        in log2 units.
    """
    acc = norm = top = torch.zeros(())
    for j in range(blocks):
        s = scores(j)
        if j == 0:
            acc = s.new_zeros((*s.shape[:3], values(0).shape[-1]))
            norm = s.new_zeros(s.shape[:3])
            top = torch.full_like(norm, -1e30)
        hidden = _hidden(s, j * block_n, seq_q, seq_k, causal)
        if hidden is not None:
            s = s.masked_fill(hidden, -math.inf)
        new_top = torch.maximum(top, s.amax(-1))
        decay = torch.exp2(top - new_top)
        p = torch.exp2(s - (new_top - p_offset)[..., None])
        norm = norm * decay + p.sum(-1)
        acc = acc * decay[..., None] + round_to(p, p_dtype).float() @ values(j)
        top = new_top
    return acc, norm, top


def _hidden(
    s: torch.Tensor, first_key: int, seq_q: int, seq_k: int, causal: bool
) -> torch.Tensor | None:
    """`(rows, block)` mask of padding and of keys behind the diagonal; `None` if there are none."""
    keys = first_key + torch.arange(s.shape[-1], device=s.device)
    hidden = None
    if first_key + s.shape[-1] > seq_k:
        hidden = (keys >= seq_k)[None, :]
    if causal:
        row = torch.arange(s.shape[2], device=s.device) % seq_q
        behind = keys[None, :] > (row + (seq_k - seq_q))[:, None]
        hidden = behind if hidden is None else hidden | behind
    return hidden


def _in_layout(
    out: torch.Tensor,
    q: torch.Tensor,
    v_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    problem: Problem,
) -> torch.Tensor:
    """The output in Q's layout and memory order, which the op's fake implementation promises."""
    result = empty_output(q, out_dtype or v_dtype)
    bhsd(result, problem.layout).copy_(out)
    return result
