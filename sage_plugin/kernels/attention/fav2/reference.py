"""Emulation of `fav2`: blockwise attention with P rounded to V's type, in plain torch."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.emulation import blockwise
from sage_plugin.kernels.contract import PlainOperands, ReadsInPlace, bhsd, empty_output
from sage_plugin.kernels.quant.recipe import LOG2E


class PlainEmulation(ReadsInPlace):
    """The emulation of FlashAttention-2: fp32 scores, P in V's type, fp32 sums."""

    def launch(
        self,
        operands: PlainOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blockwise attention."""
        problem, block_n = operands.problem, operands.config.block_n
        q, k, v = (bhsd(t, problem.layout) for t in (operands.q, operands.k, operands.v))
        batch, heads_q, seq_q, head_dim = q.shape
        heads_k, seq_k = k.shape[1], k.shape[2]
        rows = q.float().reshape(batch, heads_k, -1, head_dim)

        def block(x: torch.Tensor, j: int) -> torch.Tensor:
            return x[:, :, j * block_n : (j + 1) * block_n].float()

        acc, norm, top = blockwise(
            lambda j: rows @ block(k, j).transpose(-1, -2) * (problem.scale * LOG2E),
            lambda j: block(v, j),
            blocks=-(-seq_k // block_n),
            block_n=block_n,
            seq_q=seq_q,
            seq_k=seq_k,
            causal=problem.causal,
            p_dtype=v.dtype,
        )
        result = empty_output(operands.q, out_dtype or v.dtype)
        out = torch.where(norm[..., None] != 0, acc / norm[..., None], 0.0)
        bhsd(result, problem.layout).copy_(out.view(batch, heads_q, seq_q, -1))
        lse = ((torch.log2(norm) + top) / LOG2E).view(batch, heads_q, seq_q)
        return result, (lse.contiguous() if return_lse else None)


def build(fp8: torch.dtype = torch.float8_e4m3fn) -> PlainEmulation:
    """The emulation; it multiplies in the inputs' type, so the FP8 type does not matter."""
    return PlainEmulation()
