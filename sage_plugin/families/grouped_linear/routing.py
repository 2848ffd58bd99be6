"""How drawn calls spread their rows over groups."""

from __future__ import annotations

import torch

SKEWED = "skewed"
"""The distribution of inputs whose groups have very different sizes."""


def drawn_sizes(rows: int, groups: int, distribution: str, seed: int = 0) -> torch.Tensor:
    """Return the int32 rows of each group, all rows in all.

    `skewed` draws them by Zipf's law, the n-th group in a random order 1 / n as often as the first,
    so that many are empty where there are few rows; others spread them evenly.

    Example:
        >>> drawn_sizes(5, 3, "normal")
        tensor([2, 2, 1], dtype=torch.int32)
    """
    if distribution != SKEWED:
        sizes = torch.full((groups,), rows // groups)
        sizes[: rows % groups] += 1
        return sizes.to(torch.int32)
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randperm(groups, generator=generator) + 1
    chosen = torch.multinomial(1.0 / ranks, rows, replacement=True, generator=generator)
    return torch.bincount(chosen, minlength=groups).to(torch.int32)


def sampled_sizes(group_sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows of each group among evenly spread rows of a call, as captures save them.

    Args:
        group_sizes: `(E,)` of the call.
        count: saved rows.
    """
    ends = group_sizes.long().cumsum(0)
    total = int(ends[-1])
    places = (2 * torch.arange(count) + 1) * total // (2 * count)
    group = torch.searchsorted(ends, places, right=True)
    return torch.bincount(group, minlength=len(ends)).to(torch.int32)
