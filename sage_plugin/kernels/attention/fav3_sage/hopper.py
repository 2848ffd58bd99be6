"""Hopper variant of `fav3_sage`: INT8 Q K^T, FP8 P V, in Gluon."""

from __future__ import annotations

import torch

from sage_plugin.kernels.attention.hopper import QuantisedHopper
from sage_plugin.kernels.quant.recipe import Recipe


def build(fp8: torch.dtype = torch.float8_e4m3fn) -> QuantisedHopper:
    """The variant; its weights are always e4m3fn, Hopper's type."""
    return QuantisedHopper(Recipe(qk="int8", pv="fp8", fp8=fp8))
