"""One form for every mask that SDPA takes: four dimensions, nothing expanded."""

from __future__ import annotations

import torch

from sage_plugin.errors import UnsupportedInputError

MASK_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)


def normalized(
    attn_mask: torch.Tensor, *, batch: int, heads_q: int, seq_q: int, seq_k: int
) -> torch.Tensor:
    """A `(B or 1, Hq or 1, Sq or 1, Sk)` view of a mask; stride-0 dimensions shrink to one.

    Args:
        attn_mask: bool (True is visible) or float, broadcastable to `(B, Hq, Sq, Sk)` by the rules
            of SDPA.
        batch: batch of the call; its heads and lengths likewise.
        heads_q: query heads.
        seq_q: query length.
        seq_k: key length.

    Raises:
        UnsupportedInputError: the mask does not broadcast, or is neither bool nor fp16, bf16, fp32.

    Example:
        >>> normalized(torch.ones(2, 1, 1, 5).expand(2, 4, 3, 5), batch=2, heads_q=4, seq_q=3,
        ...            seq_k=5).shape
        torch.Size([2, 1, 1, 5])
    """
    full = (batch, heads_q, seq_q, seq_k)
    fits = attn_mask.dim() <= 4 and all(
        have in (1, want)
        for have, want in zip(reversed(attn_mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise UnsupportedInputError(
            f"attn_mask {tuple(attn_mask.shape)} does not broadcast to (B, Hq, Sq, Sk) = {full}"
        )
    if attn_mask.dtype not in MASK_DTYPES:
        raise UnsupportedInputError(
            f"attn_mask is {attn_mask.dtype}; it needs bool, float16, bfloat16 or float32"
        )
    view = attn_mask[(None,) * (4 - attn_mask.dim())]
    for dim in range(3):
        if view.shape[dim] > 1 and view.stride(dim) == 0:
            view = view.narrow(dim, 0, 1)
    return view if view.shape[3] == seq_k else view.expand(*view.shape[:3], seq_k)


def of_heads(mask: torch.Tensor | None) -> bool:
    """Whether a normalised mask differs between heads."""
    return mask is not None and mask.shape[1] > 1


def is_added(mask: torch.Tensor | None) -> bool:
    """Whether a normalised mask is added to the scores, and does not only hide keys."""
    return mask is not None and mask.dtype != torch.bool


def mask_kind(mask: torch.Tensor | None) -> str:
    """The mask kind of a normalised mask: `"none"`, `"key_bias"` (one row for all), `"dense"`."""
    if mask is None:
        return "none"
    return "key_bias" if mask.shape[2] == 1 else "dense"
