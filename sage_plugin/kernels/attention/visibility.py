"""Which keys a row sees, in torch: by position (causal, window, padding) and by its mask."""

from __future__ import annotations

import torch

from sage_plugin.kernels.contract import HIDES, AttentionParams

CHUNK_ELEMENTS = 1 << 26
"""Mask values looked at together where a dense mask is reduced to the keys that anyone sees."""


def hidden_by_position(
    rows: torch.Tensor, first_key: int, count: int, *, seq_q: int, seq_k: int, left: int, right: int
) -> torch.Tensor | None:
    """`(rows, count)` bool of the keys out of reach of each row; `None` where none is.

    Args:
        rows: query rows.
        first_key: first of the keys looked at.
        count: how many keys; those past `seq_k` are hidden.
        seq_q: query length, for the bottom-right alignment.
        seq_k: key length.
        left: keys before its own position that a row sees, negative for all.
        right: keys after its own position that a row sees, negative for all.

    Example:
        >>> hidden_by_position(torch.arange(2), 0, 3, seq_q=2, seq_k=3, left=1, right=0).tolist()
        [[False, False, True], [True, False, False]]
    """
    keys = torch.arange(first_key, first_key + count, device=rows.device)[None, :]
    own = rows[:, None] + (seq_k - seq_q)
    conditions = []
    if first_key + count > seq_k:
        conditions.append((keys >= seq_k).expand(len(rows), -1))
    if right >= 0:
        conditions.append(keys > own + right)
    if left >= 0:
        conditions.append(keys < own - left)
    if not conditions:
        return None
    hidden = conditions[0]
    for condition in conditions[1:]:
        hidden = hidden | condition
    return hidden


def hidden_by_mask(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask hides its key: False, `-inf`, or a finite value under `HIDES`."""
    if mask.dtype == torch.bool:
        return ~mask
    if mask.dtype == torch.float16:  # HIDES is -inf in it, and nothing is less
        return torch.isneginf(mask)
    return mask < HIDES


def added_by_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What a float mask adds to the scores, 0 where it hides; `None` for a bool mask."""
    if mask.dtype == torch.bool:
        return None
    return mask.to(dtype).masked_fill(hidden_by_mask(mask), 0.0)


def alive_keys(
    problem: AttentionParams, *, heads_k: int, seq_q: int, seq_k: int, device: torch.device
) -> torch.Tensor | None:
    """`(B or 1, Hk or 1, Sk)` bool of the keys that some row of a group's heads sees.

    `None` where every key is seen by someone. Only a mask and a window to the left can hide a key
    from all rows.
    """
    mask = problem.mask
    if mask is None or mask.shape[2] == 1:
        reached = None
        if problem.left >= 0:
            keys = torch.arange(seq_k, device=device)
            reached = (keys >= seq_k - seq_q - problem.left)[None, None]
        if mask is None:
            return reached
        seen = ~hidden_by_mask(mask)[:, :, 0]
        seen = seen if reached is None else seen & reached
    else:
        seen = _seen_in(mask, problem, seq_q, seq_k)
    heads = seen.shape[1]
    return seen if heads == 1 else seen.unflatten(1, (heads_k, heads // heads_k)).any(2)


def _seen_in(mask: torch.Tensor, problem: AttentionParams, seq_q: int, seq_k: int) -> torch.Tensor:
    """`(B or 1, Hq or 1, Sk)` of a dense mask, a chunk of rows at a time."""
    batch, heads = mask.shape[:2]
    seen = mask.new_zeros((batch, heads, seq_k), dtype=torch.bool)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * heads * seq_k))
    for start in range(0, seq_q, step):
        rows = torch.arange(start, min(start + step, seq_q), device=mask.device)
        hidden = hidden_by_mask(mask[:, :, start : start + step])
        out_of_reach = hidden_by_position(
            rows, 0, seq_k, seq_q=seq_q, seq_k=seq_k, left=problem.left, right=problem.right
        )
        if out_of_reach is not None:
            hidden = hidden | out_of_reach
        seen |= ~hidden.all(2)
    return seen
