"""Portable Triton variant of `fav2`."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.portable import PlainPortable


def build(fp8: torch.dtype = torch.float8_e4m3fn) -> PlainPortable:
    """The variant; it multiplies in the inputs' type, so the FP8 type does not matter."""
    return PlainPortable()
