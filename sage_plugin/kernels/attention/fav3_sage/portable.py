"""Portable Triton variant of `fav3_sage`: INT8 Q K^T, FP8 P V."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.portable import QuantisedPortable
from sage_plugin.kernels.quant.recipe import Recipe


def build(fp8: torch.dtype = torch.float8_e4m3fn) -> QuantisedPortable:
    """The variant, with the FP8 type of the hardware that it runs on."""
    return QuantisedPortable(Recipe(qk="int8", pv="fp8", fp8=fp8))
