"""Hopper variant of `sage`: INT8 Q K^T, FP16 P V, in Gluon."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.fallback import HopperOrPortable
from sage_plugin.kernels.quant.recipe import Recipe


def build(fp8: torch.dtype = torch.float8_e4m3fn) -> HopperOrPortable:
    """The variant, with the FP8 type of the hardware that it runs on."""
    return HopperOrPortable("sage", Recipe(qk="int8", pv="fp16", fp8=fp8))
