"""The Walsh-Hadamard rotation that spreads a few large channels over a block of them."""

from __future__ import annotations

import functools
import math

import torch


def rotated(x: torch.Tensor, block: int) -> torch.Tensor:
    """Each block of channels times the orthonormal Hadamard matrix, which leaves q . k alone.

    Source: QuaRot (arXiv 2404.00456) section 3.2, online rotation of queries and keys.

    Args:
        x: channels last, a multiple of `block` of them.
        block: a power of two; 0 for no rotation.

    Example:
        >>> rotated(torch.tensor([2.0, 0.0, 0.0, 0.0]), 4).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if not block:
        return x
    matrix = hadamard_matrix(block).to(x.device, x.dtype)
    return (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


@functools.lru_cache(maxsize=16)
def hadamard_matrix(size: int) -> torch.Tensor:
    """Sylvester's matrix over the root of its size: sign `(-1)^popcount(i & j)`, symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
