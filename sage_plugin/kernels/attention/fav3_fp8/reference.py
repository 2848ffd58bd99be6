"""Emulation of `fav3_fp8`: FP8 Q K^T, FP8 P V, in plain torch."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.emulation import QuantisedEmulation
from sage_plugin.kernels.quant.recipe import Recipe


def build(fp8: torch.dtype = torch.float8_e4m3fn) -> QuantisedEmulation:
    """The emulation, with the FP8 type of the hardware that it stands for."""
    return QuantisedEmulation(Recipe(qk="fp8", pv="fp8", fp8=fp8))
