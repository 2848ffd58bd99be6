"""The checksum by which a weight is known, in a capture folder and in a model's own files."""

from __future__ import annotations

import hashlib

import torch


def weight_hash(weight: torch.Tensor) -> str:
    """Return SHA-256 of a tensor's bytes, row by row, in its own dtype.

    Example:
        >>> weight_hash(torch.zeros(2, 2)) == weight_hash(torch.zeros(4))
        True
    """
    raw = weight.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()
