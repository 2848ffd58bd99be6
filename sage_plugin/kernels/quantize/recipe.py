"""Which number formats a kernel multiplies in, and the constants that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOG2E = math.log2(math.e)
TINY = 1e-30
"""Smallest absolute maximum that a scale is taken from: zero blocks stay zero, never 0/0."""

FP16_HEADROOM = 32768.0
"""Largest |V| that is kept unscaled in fp16; wider channels (bf16, fp32) get a scale."""

FP16_FLOOR = 2.0**-6
"""Channels whose largest |V| is smaller get a scale too: fp16 has few digits far under it."""

LINEAR_SHIFT = 0.456
"""Eighths of an octave that a linear exponential is moved down by, so that its mean error is 0."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of one quantised kernel.

    Attributes:
        qk: `"int8"` or `"fp8"`, the operands of Q K^T.
        pv: `"fp16"` or `"fp8"`, the operands of P V.
        fp8: the FP8 type of the device's matrix units.
    """

    qk: str
    pv: str
    fp8: torch.dtype = torch.float8_e4m3fn

    @property
    def fp8_max(self) -> float:
        """Largest finite value of the FP8 type (448 for e4m3fn, 240 for e4m3fnuz)."""
        return float(torch.finfo(self.fp8).max)

    @property
    def qk_max(self) -> float:
        """The value that the largest entry of a granule of Q or K is mapped to."""
        return 127.0 if self.qk == "int8" else self.fp8_max

    @property
    def qk_dtype(self) -> torch.dtype:
        """Storage type of quantised Q and K."""
        return torch.int8 if self.qk == "int8" else self.fp8

    @property
    def pv_dtype(self) -> torch.dtype:
        """Storage type of V and type of P in the second product."""
        return torch.float16 if self.pv == "fp16" else self.fp8

    @property
    def p_offset(self) -> float:
        """log2 of the value that a row's largest P is stored as, just under the type's maximum."""
        return 0.0 if self.pv == "fp16" else math.log2(self.fp8_max) - 1e-4
