"""Emulation of `fav2`: blockwise attention with P rounded to V's type, in plain torch."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.backends.emulation.online_softmax import (
    blockwise,
    finished,
    rounded_weights,
)
from sage_plugin.kernels.attention.backends.emulation.scores import ScoreRules
from sage_plugin.kernels.attention.backends.sequences import sequences
from sage_plugin.kernels.contract import (
    AttentionParams,
    OutputForm,
    PlainOperands,
    ReadsInPlace,
    bhsd,
)
from sage_plugin.kernels.quantize.emulation import poisoned_keys
from sage_plugin.kernels.quantize.recipe import LOG2E


class PlainEmulation(ReadsInPlace):
    """The emulation of FlashAttention-2: fp32 scores, P in V's type, fp32 sums."""

    def launch(
        self,
        operands: PlainOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blockwise attention, a sequence at a time."""
        problem, block_n = operands.problem, operands.config.block_n
        form = OutputForm.of(operands.q, problem.layout)
        result, lse = form.empty(out_dtype or operands.v.dtype), form.empty_lse()
        for rows, q, k, v in sequences(problem, operands.q, operands.k, operands.v):
            out, norm = _attended(q, k, v, problem, block_n)
            bhsd(result, problem.layout)[:, :, rows] = out
            lse[:, :, rows] = norm
        return result, (lse if return_lse else None)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: AttentionParams, block_n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads_q, seq_q, head_dim = q.shape
    heads_k, seq_k = k.shape[1], k.shape[2]
    if seq_k == 0:  # one key of padding, so that there is a block
        k, v = (x.new_zeros((*x.shape[:2], 1, x.shape[3])) for x in (k, v))
    poison = poisoned_keys(k, v)
    k, v = (x.masked_fill(poison[..., None], 0.0) for x in (k, v))
    rows = q.float().reshape(batch, heads_k, -1, head_dim)
    rules = ScoreRules(problem, seq_q, seq_k, block_n, poison=poison)

    def block(x: torch.Tensor, j: int) -> torch.Tensor:
        return x[:, :, j * block_n : (j + 1) * block_n].float()

    def scores(j: int) -> torch.Tensor:
        return rules.applied(rows @ block(k, j).transpose(-1, -2) * (problem.scale * LOG2E), j)

    sums = blockwise(
        scores,
        lambda j: block(v, j),
        blocks=-(-k.shape[2] // block_n),
        weigh=rounded_weights(v.dtype),
    )
    return finished(sums.mean(), sums.lse2(), problem.sinks, heads_q=heads_q, seq_q=seq_q)
