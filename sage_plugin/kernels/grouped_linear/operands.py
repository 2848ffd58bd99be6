"""What a backend multiplies: rows sorted by group, a weight for each group, and their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class GroupedOperands(NamedTuple):
    """The tensors of one product.

    Attributes:
        x: `(T, K)` contiguous, of 8 or 16 bits.
        x_scale: `(T, 1)` fp32 of 8-bit rows, else `None`.
        weights: `(E, N, K)` contiguous, of the dtype of `x`.
        w_scale: `(E, N)` fp32 of 8-bit weights, else `None`.
        group_sizes: `(E,)` int32, on their device.
        bias: `(E, N)`, or `None`.
    """

    x: torch.Tensor
    x_scale: torch.Tensor | None
    weights: torch.Tensor
    w_scale: torch.Tensor | None
    group_sizes: torch.Tensor
    bias: torch.Tensor | None


GroupedBackend = Callable[[GroupedOperands, torch.dtype], torch.Tensor]
"""What multiplies rows with the weight of their group, `(T, N)` of a dtype; rows beyond the last
group are 0."""


def ends_of(group_sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the int32 end of each group, none beyond the rows that there are.

    Example:
        >>> ends_of(torch.tensor([2, 0, 5], dtype=torch.int32), 6)
        tensor([2, 2, 6], dtype=torch.int32)
    """
    sizes = group_sizes.clamp(0, rows)
    return torch.cumsum(sizes, 0).clamp_max(rows).to(torch.int32)


def zero_tail(out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return an output with zeros in the rows beyond the last group; traceable."""
    rows = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill((rows >= ends[-1])[:, None], 0.0)
