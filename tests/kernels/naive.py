"""Attention as its definition reads, in fp64 with all scores at once: what tests compare with."""

from __future__ import annotations

import math

import torch


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
    """Output and LSE of `(B, H, S, D)` tensors; the mask is anything that broadcasts."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q.shape[3] ** -0.5 if scale is None else scale) * (q @ k.transpose(2, 3))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = reach(q.shape[2], k.shape[2], causal=causal, window=window)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible = visible & (mask.double() >= -1e38)
        scores = scores + mask.double().clamp_min(-1e300)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        extra = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], 3)
    weights = scores.softmax(3).nan_to_num(0.0)[..., : k.shape[2]]
    return weights @ v, torch.logsumexp(scores, 3)


def reach(
    seq_q: int, seq_k: int, *, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> torch.Tensor:
    """`(Sq, Sk)` bool of the keys that causality and window leave to each row."""
    row = torch.arange(seq_q)[:, None] + seq_k - seq_q
    key = torch.arange(seq_k)[None, :]
    left, right = window
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if causal:
        visible &= key <= row
    if right >= 0:
        visible &= key <= row + right
    if left >= 0:
        visible &= key >= row - left
    return visible
