"""From a kernel's and a variant's name to the object that computes it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from sage_plugin.errors import DeviceError, UnknownKernelError
from sage_plugin.kernels.attention.host import HostKernel
from sage_plugin.kernels.contract import HOST, Implementation
from sage_plugin.kernels.oracle import OracleKernel

MODULES = {"emulation": "reference", "portable": "portable", "hopper": "hopper"}
TRITON_KERNELS = {
    "fav2": ("emulation", "portable"),
    "sage": ("emulation", "portable", "hopper"),
    "fav3_sage": ("emulation", "portable", "hopper"),
    "fav3_fp8": ("emulation", "portable", "hopper"),
}
"""Variants that are built, by kernel."""

ON_GPUS = ("portable", "hopper")
"""Variants that are written in Triton."""


@functools.cache
def implementation(
    kernel: str, variant: str, fp8: torch.dtype = torch.float8_e4m3fn
) -> Implementation[Any]:
    """The implementation of a kernel's variant.

    Args:
        kernel: a name of `schema.KERNELS`.
        variant: `"emulation"`, `"portable"` or `"hopper"`; `"host"` for `torch` and `sdpa`.
        fp8: FP8 type of the device's matrix units.

    Raises:
        UnknownKernelError: the pair does not exist.
        DeviceError: Triton is needed and cannot be imported.

    Example:
        >>> type(implementation("sage", "emulation")).__name__
        'QuantisedEmulation'
    """
    if variant == HOST and kernel in ("torch", "sdpa"):
        return OracleKernel() if kernel == "torch" else HostKernel()
    if variant not in TRITON_KERNELS.get(kernel, ()):
        known = [f"{k}:{v}" for k, vs in TRITON_KERNELS.items() for v in vs]
        raise UnknownKernelError(
            f"kernel {kernel}:{variant} does not exist; choose one of torch:host, sdpa:host, "
            + ", ".join(known)
        )
    try:
        home = importlib.import_module(f"sage_plugin.kernels.attention.{kernel}.{MODULES[variant]}")
    except ImportError as error:
        raise DeviceError(
            f"kernel {kernel}:{variant} needs Triton, which cannot be imported here ({error}); "
            "install it with `pip install sage-plugin[triton]`"
        ) from error
    built: Implementation[Any] = home.build(fp8)
    return built
