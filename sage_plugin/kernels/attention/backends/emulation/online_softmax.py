"""Softmax over one block of keys after another, and what becomes of its sums, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sage_plugin.kernels.quantize.emulation import round_to
from sage_plugin.kernels.quantize.recipe import LOG2E

Block = Callable[[int], torch.Tensor]
Weights = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]

FIRST_TOP = -3e38
"""A row's maximum before its first key: finite, and under any score that is not hidden."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """What online softmax leaves of each row, `(B, Hk, G*Sq)`.

    Attributes:
        acc: unnormalised output, with one more dimension.
        norm: sum of the weights, 0 for rows without a visible key.
        top: largest score, in log2 units.
        p_offset: log2 of the value that the largest weight is stored as.
    """

    acc: torch.Tensor
    norm: torch.Tensor
    top: torch.Tensor
    p_offset: float

    def mean(self) -> torch.Tensor:
        """The normalised output, of no meaning in rows without a visible key."""
        return self.acc / self.norm[..., None]

    def lse2(self, shift: torch.Tensor | None = None) -> torch.Tensor:
        """LSE in log2 units, `-inf` for rows without a visible key; `shift` is added to others."""
        total = torch.log2(self.norm) - self.p_offset + self.top
        total = total if shift is None else total + shift
        return total.masked_fill(self.norm == 0, -math.inf)


def rounded_weights(p_dtype: torch.dtype) -> Weights:
    """Weights rounded to a type, and exact ones for the row sums, from exponents and a block."""

    def weigh(x: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        p = torch.exp2(x)
        return round_to(p, p_dtype).float(), p

    return weigh


def blockwise(
    scores: Block, values: Block, *, blocks: int, weigh: Weights, p_offset: float = 0.0
) -> RowSums:
    """Online softmax over key blocks, as the kernels do it (FlashAttention-2, arXiv 2307.08691).

    Args:
        scores: block index -> `(B, Hk, G*Sq, block_n)` scores in log2 units, `-inf` where hidden.
        values: block index -> `(B, Hk, block_n, Dv)` fp32 values.
        blocks: number of key blocks, at least one.
        weigh: exponents of a block's weights, `p_offset` at most, and its index -> weights as the
            second product takes them, and as row sums do.
        p_offset: log2 of the value that a row's largest P is stored as.
    """
    acc = norm = top = torch.zeros(())
    for j in range(blocks):
        s = scores(j)
        if j == 0:
            acc = s.new_zeros((*s.shape[:3], values(0).shape[-1]))
            norm = s.new_zeros(s.shape[:3])
            top = torch.full_like(norm, FIRST_TOP)
        new_top = torch.maximum(top, s.amax(-1))
        decay = torch.exp2(top - new_top)
        p, summed = weigh(s - (new_top - p_offset)[..., None], j)
        norm = norm * decay + summed.sum(-1)
        acc = acc * decay[..., None] + p @ values(j)
        top = new_top
    return RowSums(acc, norm, top, p_offset)


def finished(
    out: torch.Tensor,
    lse2: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    heads_q: int,
    seq_q: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give sinks their weight, dead rows their zero, and rows their place.

    Args:
        out: `(B, Hk, G*Sq, Dv)`, softmax over keys alone.
        lse2: `(B, Hk, G*Sq)`, its LSE in log2 units, by true scores.
        sinks: `(Hq,)` natural-log units, or `None`.
        heads_q: query heads.
        seq_q: query length.

    Returns:
        `(B, Hq, Sq, Dv)` and the natural-log LSE `(B, Hq, Sq)`.
    """
    shape = (out.shape[0], heads_q, seq_q)
    out, lse2 = out.reshape(*shape, -1), lse2.reshape(shape)
    dead = torch.isneginf(lse2)
    if sinks is not None:
        total = torch.logaddexp2(lse2, (sinks.float() * LOG2E)[:, None])
        out = out * torch.exp2(lse2 - total)[..., None]
        lse2 = total
    return out.masked_fill(dead[..., None], 0.0), lse2 * math.log(2.0)
