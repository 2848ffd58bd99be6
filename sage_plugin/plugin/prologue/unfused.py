"""Why norm and rotary embedding of a call ran as the model has them."""

from __future__ import annotations

from enum import Enum


class Unfused(Enum):
    """One reason each; the value is its sentence."""

    DISABLED = "SAGE_PLUGIN_DISABLE is set"
    EXACT = "kernel 'sdpa' leaves every result as it is"
    SHORT = "the call is shorter than min_seq"
    DEVICE = "no kernel of ours runs on this device"
    DTYPE = "Q and K are not of 16 or 32 bits"
    GRADIENT = "a gradient is needed"
    AUTOCAST = "autocast chooses the dtypes"
    DISTURBED = "a tensor subclass, or a mode or transform of torch, takes part"
    COMPILED = "a compiler left the norm or embedding to Python, and reads what it gives"
    HOOKED = "somebody hooks the norm, such as offloading"
    NORM = "the norm gives another dtype, or is over other channels"
    OPERATION = "something else is done with Q or K before attention"
    CAPTURING = "a CUDA graph is recorded before the first comparison with the model's own"
    BUILD_FAILED = "the kernel cannot be built here"
    DIFFERENT = "it differed from the model's own by more than rounding"

    @property
    def is_told(self) -> bool:
        """Whether the text of a report tells it: nobody asked for it, nor for another device."""
        return self not in (Unfused.DISABLED, Unfused.EXACT, Unfused.DEVICE)
