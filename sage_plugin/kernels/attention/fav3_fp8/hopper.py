"""Hopper variant of `fav3_fp8`: FP8 Q K^T, FP8 P V, in Gluon."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.fallback import HopperOrPortable
from sage_plugin.kernels.quant.recipe import Recipe


def build(fp8: torch.dtype = torch.float8_e4m3fn) -> HopperOrPortable:
    """The variant, with the FP8 type of the hardware that it runs on."""
    return HopperOrPortable("fav3_fp8", Recipe(qk="fp8", pv="fp8", fp8=fp8))
