"""Exact emulation of blockwise attention in torch: every kernel's maths, a key block at a time.

It follows the kernels step by step (running maximum, rounding of P to its type, one fp32 partial
product a block), so what it differs by from the oracle is quantisation, and what a GPU variant
differs by from it is a bug or the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.kernels.attention.backends.emulation.linear_exponential import linear_weights
from sage_plugin.kernels.attention.backends.emulation.online_softmax import (
    blockwise,
    finished,
    rounded_weights,
)
from sage_plugin.kernels.attention.backends.emulation.scores import ScoreRules
from sage_plugin.kernels.attention.backends.sequences import sequences
from sage_plugin.kernels.attention.visibility import alive_keys
from sage_plugin.kernels.contract import AttentionParams, OutputForm, bhsd
from sage_plugin.kernels.quantize.emulation import (
    QuantizedK,
    QuantizedQ,
    QuantizedV,
    poisoned_keys,
    quantize_k,
    quantize_q,
    quantize_v,
)
from sage_plugin.kernels.quantize.recipe import LOG2E, Recipe
from sage_plugin.schema import LaunchConfig


@dataclass(frozen=True, slots=True)
class EmulatedSequence:
    """Quantised operands of one sequence.

    Attributes:
        rows: its rows in the output.
        queries: quantised queries; keys and values likewise.
        keys: quantised keys.
        values: quantised values.
        shift: `(B, Hk, G*Sq)` fp32, q . mean(K) in log2 units, what smoothing took from the scores.
        poison: `(B, Hk, Sk)` bool of the keys that are seen and not finite.
        seq_k: key length.
    """

    rows: slice
    queries: QuantizedQ
    keys: QuantizedK
    values: QuantizedV
    shift: torch.Tensor
    poison: torch.Tensor
    seq_k: int


@dataclass(frozen=True, slots=True)
class EmulatedOperands:
    """Quantised operands, one sequence after another, and the form of the output."""

    sequences: tuple[EmulatedSequence, ...]
    form: OutputForm
    v_dtype: torch.dtype
    problem: AttentionParams
    launch_config: LaunchConfig


class QuantizedEmulation:
    """The emulation of a kernel that quantises by a `Recipe`."""

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
    ) -> EmulatedOperands:
        """Quantise with the torch twins, by the blocks of `launch`."""
        parts = tuple(
            self._quantized(rows, *qkv, problem=problem, launch=launch)
            for rows, *qkv in sequences(problem, q, k, v)
        )
        return EmulatedOperands(parts, OutputForm.of(q, problem.layout), v.dtype, problem, launch)

    def _quantized(
        self,
        rows: slice,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        problem: AttentionParams,
        launch: LaunchConfig,
    ) -> EmulatedSequence:
        recipe, seq_k = self.recipe, k.shape[2]
        alive = alive_keys(
            problem, heads_k=k.shape[1], seq_q=q.shape[2], seq_k=seq_k, device=q.device
        )
        if seq_k == 0:  # one key of padding, so that there is a block
            k, v = (x.new_zeros((*x.shape[:2], 1, x.shape[3])) for x in (k, v))
            alive = None
        poison = poisoned_keys(k, v, alive)
        queries = quantize_q(
            q, scale=problem.scale, recipe=recipe, hadamard=launch.hadamard,
            granule=launch.q_granule,
        )  # fmt: skip
        keys = quantize_k(
            k, block_n=launch.block_n, smooth=launch.smooth_k, recipe=recipe,
            hadamard=launch.hadamard, alive=alive, poison=poison,
        )  # fmt: skip
        values = quantize_v(
            v, block_n=launch.block_n, smooth=launch.smooth_v, recipe=recipe, alive=alive,
            poison=poison,
        )  # fmt: skip
        plain = q.float().reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        shift = (plain @ keys.mean[..., None])[..., 0] * (problem.scale * LOG2E)
        return EmulatedSequence(rows, queries, keys, values, shift, poison, seq_k)

    def launch(
        self,
        operands: EmulatedOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blockwise attention on the quantised operands."""
        form = operands.form
        result, lse = form.empty(out_dtype or operands.v_dtype), form.empty_lse()
        for part in operands.sequences:
            out, norm = self._attended(part, operands.problem, operands.launch_config)
            bhsd(result, form.layout)[:, :, part.rows] = out
            lse[:, :, part.rows] = norm
        return result, (lse if return_lse else None)

    def _attended(
        self, part: EmulatedSequence, problem: AttentionParams, launch: LaunchConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, values = part.queries, part.keys, part.values
        batch, heads_q, seq_q, head_dim = queries.values.shape
        heads_k = keys.values.shape[1]
        rows = queries.values.float().reshape(batch, heads_k, -1, head_dim)
        row_scale = queries.scale.reshape(batch, heads_k, -1)
        rules = ScoreRules(
            problem, seq_q, part.seq_k, launch.block_n, shift=part.shift, poison=part.poison
        )

        def scores(j: int) -> torch.Tensor:
            product = rows @ keys.values[:, :, j].float().transpose(-1, -2)
            return rules.applied(product * (row_scale * keys.scale[:, :, j, None])[..., None], j)

        p_dtype = self.recipe.pv_dtype
        weigh = rounded_weights(p_dtype)
        if launch.exp_linear:
            weigh = linear_weights(problem, launch, p_dtype, seq_q=seq_q, seq_k=part.seq_k)
        sums = blockwise(
            scores,
            lambda j: values.values[:, :, j].float(),
            blocks=keys.values.shape[2],
            weigh=weigh,
            p_offset=self.recipe.p_offset,
        )
        out = sums.mean() * values.scale[:, :, None] + values.owed[:, :, None]
        # Under a softcap the scores have their shift already.
        lse2 = sums.lse2(None if problem.softcap else part.shift)
        return finished(out, lse2, problem.sinks, heads_q=heads_q, seq_q=seq_q)
