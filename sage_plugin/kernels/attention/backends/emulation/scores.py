"""From products of Q and K to the scores that softmax sees: cap, bias, poison and hidden keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sage_plugin.kernels.attention.visibility import (
    added_by_mask,
    hidden_by_mask,
    hidden_by_position,
)
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize.recipe import LOG2E


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """What is done to the scores of a key block, in this order, all in log2 units.

    Attributes:
        problem: the call, of one sequence.
        seq_q: query length.
        seq_k: key length; keys past it are padding.
        block_n: keys of a block.
        shift: `(B, Hk, G*Sq)`, added before a softcap (it needs the true score); `None` elsewhere.
        poison: `(B, Hk, Sk)` bool of the keys that make NaN of the rows that see them, or `None`.
    """

    problem: AttentionParams
    seq_q: int
    seq_k: int
    block_n: int
    shift: torch.Tensor | None = None
    poison: torch.Tensor | None = None

    def applied(self, s: torch.Tensor, block: int) -> torch.Tensor:
        """`(B, Hk, G*Sq, N)` scores of a block, `-inf` where hidden."""
        problem, first = self.problem, block * self.block_n
        if problem.softcap:
            cap = problem.softcap * LOG2E
            s = s if self.shift is None else s + self.shift[..., None]
            s = cap * torch.tanh(s / cap)
        heads_k, keys = s.shape[1], s.shape[3]
        x = s.unflatten(2, (-1, self.seq_q))
        mask = None if problem.mask is None else self._mask(problem.mask, heads_k, first, keys)
        bias = None if mask is None else added_by_mask(mask, torch.float32)
        if bias is not None:
            x = x + bias * LOG2E
        if self.poison is not None:
            x = x.masked_fill(self._padded(self.poison, first, keys)[:, :, None, None], math.nan)
        if mask is not None:
            x = x.masked_fill(hidden_by_mask(mask), -math.inf)
        hidden = hidden_by_position(
            torch.arange(self.seq_q, device=s.device), first, keys, seq_q=self.seq_q,
            seq_k=self.seq_k, left=problem.left, right=problem.right,
        )  # fmt: skip
        x = x if hidden is None else x.masked_fill(hidden, -math.inf)
        return x.flatten(2, 3)

    def _mask(self, mask: torch.Tensor, heads_k: int, first: int, keys: int) -> torch.Tensor:
        """The block's part of a mask, `(B or 1, Hk or 1, G or 1, Sq or 1, N)`."""
        part = self._padded(mask, first, keys)
        heads = mask.shape[1]
        return part.unflatten(1, (1, 1) if heads == 1 else (heads_k, heads // heads_k))

    @staticmethod
    def _padded(x: torch.Tensor, first: int, keys: int) -> torch.Tensor:
        part = x[..., first : first + keys]
        return torch.nn.functional.pad(part, (0, keys - part.shape[-1]))
