"""`AttentionParams` written out in fp64: the whole score matrix, and what each row sees."""

from __future__ import annotations

import math

import torch

from sage_plugin.kernels.contract import AttentionParams


def visible(seq_q: int, seq_k: int, problem: AttentionParams) -> torch.Tensor:
    """`(Sq, Sk)` bool by position: row i stands at key i + Sk - Sq."""
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool)
    left, right = problem.window
    for i in range(seq_q):
        own = i + seq_k - seq_q
        if problem.causal:
            seen[i, max(own + 1, 0) :] = False
        if right >= 0:
            seen[i, max(own + right + 1, 0) :] = False
        if left >= 0:
            seen[i, : max(own - left, 0)] = False
    return seen


def seen_by(
    problem: AttentionParams, batch: int, heads: int, seq_q: int, seq_k: int
) -> torch.Tensor:
    """`(B, Hq, Sq, Sk)` bool, position and mask together."""
    seen = visible(seq_q, seq_k, problem).expand(batch, heads, seq_q, seq_k)
    if problem.mask is None:
        return seen
    mask = problem.mask.expand(batch, heads, seq_q, seq_k)
    return seen & (mask if mask.dtype == torch.bool else mask.double() >= -1e38)


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of `(B, H, S, D)` tensors, fp64; dead rows are 0."""
    batch, heads, seq_q, _ = q.shape
    seq_k, ratio = k.shape[2], heads // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(ratio, 1), v.double()
    v = v.repeat_interleave(ratio, 1)
    scores = q @ k.transpose(-1, -2) * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    seen = seen_by(problem, batch, heads, seq_q, seq_k)
    if problem.mask is not None and problem.mask.dtype != torch.bool:
        scores = scores + problem.mask.double().nan_to_num(neginf=0.0)
    scores = scores.masked_fill(~seen, -math.inf)
    if problem.sinks is not None:
        sinks = problem.sinks.double()[None, :, None, None].expand(batch, heads, seq_q, 1)
        scores = torch.cat([scores, sinks], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ v, torch.logsumexp(scores, -1)


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the arguments of `attention`; the mask is anything that broadcasts."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    problem = AttentionParams(factor, causal, "bhsd", mask, window, softcap, sinks)
    return written_out(q, k, v, problem)
