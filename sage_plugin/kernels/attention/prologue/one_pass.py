"""Whether norm and rotary embedding join the quantization of Q, or are a pass before it."""

from __future__ import annotations

from enum import Enum

from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.contract import AttentionParams, Decision
from sage_plugin.kernels.quantize.operands import needs_shift
from sage_plugin.kernels.support import ON_GPUS
from sage_plugin.schema import LaunchConfig

QUANTIZING = ("sage", "fav3_sage", "fav3_fp8")
"""Kernels that quantize Q and K."""


class OnePass(Enum):
    """Why norm and embedding of Q are a pass of their own; the value is its sentence."""

    UNQUANTIZED = "the kernel reads Q in 16 bits"
    EMULATED = "the emulation does one after the other"
    MEAN = "queries meet the mean of the keys first, for the LSE, a soft cap or sinks"
    ROTATED = "the launch config rotates channels before they are quantized"
    GRANULE = "the launch config lets rows of Q share a scale"
    PACKED = "sequences are packed"
    NOTHING = "Q has neither norm nor rotary embedding"
    BUILD_FAILED = "the fused kernel cannot be built here"
    CAPTURING = "a CUDA graph is recorded before the first comparison with two passes"
    DIFFERENT = "it differed from two passes by more than rounding"

    @property
    def is_told(self) -> bool:
        """Whether the text of a report tells it: the kernel quantizes Q, and might have then."""
        return self not in (OnePass.UNQUANTIZED, OnePass.EMULATED, OnePass.NOTHING)


def one_pass_reason(
    decision: Decision, launch: LaunchConfig | None, numbers: AttentionParams, pair: QkPair
) -> OnePass | None:
    """Why they are a pass of their own before a call, `None` where quantization does them."""
    if decision.kernel not in QUANTIZING or launch is None:
        return OnePass.UNQUANTIZED
    if decision.variant not in ON_GPUS:
        return OnePass.EMULATED
    if numbers.packed is not None:
        return OnePass.PACKED
    if needs_shift(numbers, launch):
        return OnePass.MEAN
    if launch.hadamard:
        return OnePass.ROTATED
    if launch.q_granule > 1:
        return OnePass.GRANULE
    return None if any(x.norm or x.rope for x in pair.q) else OnePass.NOTHING
