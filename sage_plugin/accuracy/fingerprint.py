"""A cheap content hash of a tensor, computed where the tensor lies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS = 1 << 24
"""Values looked at together: a dense mask is one large matrix."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that changes when shape, dtype or any value of the tensor changes.

    A weighted sum over the bits of each matrix of the last two dimensions, many small ones at once,
    so that a large or strided tensor is never copied as a whole. It finds accidents, not forgeries.

    Example:
        >>> a = torch.zeros(2, 3, 4)
        >>> before = fingerprint(a)
        >>> a[0, 0, 0] = 1.0
        >>> fingerprint(a) == before
        False
    """
    sums = [_weighted(piece) for piece in _pieces(tensor)]
    values = torch.cat(sums).tolist() if sums else []
    return hash((tuple(tensor.shape), tensor.dtype, tuple(values)))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor into stacks of its matrices, small ones or of a single large matrix."""
    if tensor.dim() > 3 and tensor.numel() > CHUNK_ELEMENTS:
        step = CHUNK_ELEMENTS * len(tensor) // tensor.numel()
        for part in tensor.split(max(1, step)):
            yield from _pieces(part if step else part[0])
        return
    if tensor.dim() < 3:
        tensor = tensor.reshape(1, 1, -1) if tensor.dim() < 2 else tensor[None]
    matrices = tensor.flatten(0, -3)
    if matrices.numel():
        yield from matrices.split(max(1, CHUNK_ELEMENTS * len(matrices) // matrices.numel()))


def _weighted(matrices: torch.Tensor) -> torch.Tensor:
    """Sums of the bits of each matrix times odd, position-dependent weights, modulo 2**64."""
    bits = matrices.contiguous().view(_BITS[matrices.element_size()]).flatten(1)
    total = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    step = max(1, CHUNK_ELEMENTS // max(1, len(bits)))
    for start in range(0, bits.shape[1], step):
        part = bits[:, start : start + step].to(torch.int64)
        places = torch.arange(start, start + part.shape[1], device=bits.device)
        total += (part * ((2 * places + 1) * _ODD)).sum(1)
    return total
