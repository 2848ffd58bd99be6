"""A cheap content hash of a tensor, computed where the tensor lies."""

from __future__ import annotations

import itertools

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS = 1 << 24
"""Values looked at together: a dense mask is one large matrix."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that changes when shape, dtype or any value of the tensor changes.

    A weighted sum over the bits of each matrix of the last two dimensions, so that a large or
    strided tensor is never copied as a whole. It finds accidents, not forgeries.

    Example:
        >>> a = torch.zeros(2, 3, 4)
        >>> before = fingerprint(a)
        >>> a[0, 0, 0] = 1.0
        >>> fingerprint(a) == before
        False
    """
    leading = itertools.product(*(range(size) for size in tensor.shape[:-2]))
    sums = [_weighted(tensor[index]) for index in leading]
    values = torch.stack(sums).tolist() if sums else []
    return hash((tuple(tensor.shape), tensor.dtype, tuple(values)))


def _weighted(matrix: torch.Tensor) -> torch.Tensor:
    """Sum of bits times odd, position-dependent weights, modulo 2**64."""
    bits = matrix.contiguous().view(_BITS[matrix.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK_ELEMENTS):
        part = bits[start : start + CHUNK_ELEMENTS].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=bits.device)
        total += (part * ((2 * places + 1) * _ODD)).sum()
    return total
