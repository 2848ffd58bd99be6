"""From a kernel's and a variant's name to the object that computes it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sage_plugin.errors import DeviceError, UnknownKernelError
from sage_plugin.kernels.attention.backends.sdpa import HostKernel
from sage_plugin.kernels.attention.oracle import OracleKernel
from sage_plugin.kernels.contract import HOST, Decision, Implementation
from sage_plugin.kernels.quantize.recipe import Recipe
from sage_plugin.kernels.support import TRITON_KERNELS
from sage_plugin.schema import DeviceFacts

FORMATS = {
    "sage": ("int8", "fp16"),
    "fav3_sage": ("int8", "fp8"),
    "fav3_fp8": ("fp8", "fp8"),
}
"""Number formats of Q K^T and of P V, by quantized kernel.

Sources: SageAttention (arXiv 2410.02367), SageAttention2 (2411.10958), FlashAttention-3
(2407.08608).
"""


def built(decision: Decision, facts: DeviceFacts) -> Implementation[Any]:
    """The implementation of what was decided, with the FP8 type of the device."""
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    return implementation(decision.kernel, decision.variant, fp8)


@functools.cache
def implementation(
    kernel: str, variant: str, fp8: torch.dtype = torch.float8_e4m3fn
) -> Implementation[Any]:
    """Return the implementation of a kernel's variant."""
    if variant == HOST and kernel in ("torch", "sdpa"):
        return OracleKernel() if kernel == "torch" else HostKernel()
    if variant not in TRITON_KERNELS.get(kernel, ()):
        known = [f"{k}:{v}" for k, vs in TRITON_KERNELS.items() for v in vs]
        raise UnknownKernelError(
            f"kernel {kernel}:{variant} does not exist; choose one of torch:host, sdpa:host, "
            + ", ".join(known)
        )
    try:
        made: Implementation[Any] = _built(kernel, variant, fp8)
    except ImportError as error:
        raise DeviceError(
            f"kernel {kernel}:{variant} needs Triton, which cannot be imported here ({error}); "
            "install it with `pip install sage-plugin[triton]`"
        ) from error
    return made


def _built(kernel: str, variant: str, fp8: torch.dtype) -> Any:  # noqa: ANN401
    """Import the backend, which needs Triton on a GPU, and build the kernel in its formats."""
    recipe = None
    if kernel in FORMATS:
        qk, pv = FORMATS[kernel]
        recipe = Recipe(qk=qk, pv=pv, fp8=fp8)
    if variant == "emulation":
        from sage_plugin.kernels.attention.backends.emulation.flash import PlainEmulation
        from sage_plugin.kernels.attention.backends.emulation.quantized import QuantizedEmulation

        return PlainEmulation() if recipe is None else QuantizedEmulation(recipe)
    if variant == "portable":
        from sage_plugin.kernels.attention.backends.triton.launch import (
            PlainPortable,
            QuantizedPortable,
        )

        return PlainPortable() if recipe is None else QuantizedPortable(recipe)
    from sage_plugin.kernels.attention.backends.hopper.with_fallback import HopperOrPortable

    assert recipe is not None, "TRITON_KERNELS has no Hopper variant of an unquantized kernel"
    return HopperOrPortable(kernel, recipe)
