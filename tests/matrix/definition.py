"""Attention by its definition, in fp64 with all scores at once: what kernels are held to."""

from __future__ import annotations

import math

import torch

from sage_plugin.kernels.contract import AttentionParams

HIDES = -1e38
"""Float mask values under it hide a key."""


def in_reach(
    seq_q: int, seq_k: int, causal: bool = False, window: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return `(Sq, Sk)` bool of the keys that position leaves to each row.

    Row i stands at key i + Sk - Sq, so that the last row sees the last key.
    """
    row = torch.arange(seq_q)[:, None] + seq_k - seq_q
    key = torch.arange(seq_k)[None, :]
    left, right = window or (-1, -1)
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if causal:
        seen &= key <= row
    if right >= 0:
        seen &= key <= row + right
    if left >= 0:
        seen &= key >= row - left
    return seen


def seen_by(
    problem: AttentionParams, batch: int, heads: int, seq_q: int, seq_k: int
) -> torch.Tensor:
    """Return `(B, Hq, Sq, Sk)` bool of what position and mask leave to each row."""
    seen = in_reach(seq_q, seq_k, problem.causal, problem.window)
    if problem.mask is not None:
        seen = seen.to(problem.mask.device) & _keeps(problem.mask)
    return seen.expand(batch, heads, seq_q, seq_k)


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of `(B, H, S, D)` tensors; fully masked rows are 0.

    The options are those of `attention`; the mask is anything that broadcasts.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = in_reach(q.shape[2], k.shape[2], is_causal, window).to(q.device)
    if mask is not None:
        seen = seen & _keeps(mask)
        if mask.dtype != torch.bool:
            scores = scores + mask.double().clamp_min(-1e300)
    scores = scores.masked_fill(~seen, -math.inf)
    sink = None if sinks is None else sinks.double()[None, :, None, None]
    top = scores.amax(3, keepdim=True)
    top = top if sink is None else torch.maximum(top, sink)
    top = top.where(top > -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(3, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    out = weights @ v / total.where(total > 0, 1.0)
    return out, (total.log() + top).squeeze(3)


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same of bhsd tensors and a kernel's parameters."""
    return definition(
        q, k, v, problem.mask, is_causal=problem.causal, window=problem.window,
        softcap=problem.softcap, sinks=problem.sinks, scale=problem.scale,
    )  # fmt: skip


def _keeps(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask.double() >= HIDES
