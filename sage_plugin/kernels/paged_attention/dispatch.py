"""The decision table: which kernel and backend a call of paged attention runs on, or a refusal.

Nothing else computes such calls, so that there is no fallback: what no kernel takes is refused.
"""

from __future__ import annotations

import torch

from sage_plugin.errors import UnsupportedInputError, check_name
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.validate import FP8
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.support import NO_FP8, device_reason
from sage_plugin.paged_records import PAGED_BACKENDS, PAGED_KERNELS
from sage_plugin.schema import DeviceFacts

BITS = {"qk_int8": (torch.int8,), "qk_fp8": FP8}
"""Caches that a kernel with quantized queries reads."""


def parse_kernel(text: str) -> tuple[str, str]:
    """Split `kernel` or `kernel:backend` into names that exist; the backend defaults to `"auto"`.

    Raises:
        UnknownKernelError: the kernel or its backend is not known.

    Example:
        >>> parse_kernel("fav2:emulation")
        ('fav2', 'emulation')
    """
    kernel, _, backend = text.partition(":")
    backend = backend or "auto"
    check_name("kernel", kernel, PAGED_KERNELS, " of paged attention")
    check_name("backend", backend, PAGED_BACKENDS, " of paged attention")
    return kernel, backend


def decide(call: PagedCall, facts: DeviceFacts, request: BackendRequest) -> Decision:
    """Return which kernel and backend a call runs on.

    Args:
        call: the call; its tensors fit together.
        facts: the device of its tensors.
        request: what was asked for.

    Raises:
        UnsupportedInputError: the kernel cannot take the call, or the device cannot run it.
    """
    kernel, backend = request.kernel, request.backend
    kernel = "fav2" if kernel == "auto" else kernel
    cache = call.k_cache.dtype
    if not reads(kernel, cache):
        raise UnsupportedInputError(
            f"kernel {kernel!r} quantizes queries as the cache is, and this is {cache}; use "
            "kernel='auto'"
        )
    if backend == "emulation" or (backend == "auto" and facts.kind == "cpu"):
        return Decision(kernel, "emulation")
    reason = device_reason(kernel, facts) or cache_reason(cache, facts)
    if reason is not None:
        raise UnsupportedInputError(
            f"paged attention cannot run on {facts.name}: {reason}; on any device "
            f"kernel='{kernel}:emulation' computes the same, slowly"
        )
    return Decision(kernel, "triton")


def reads(kernel: str, cache: torch.dtype | None) -> bool:
    """Whether a kernel reads caches of a type, `None` for that of the queries.

    Example:
        >>> reads("fav2", torch.int8), reads("qk_fp8", torch.int8), reads("qk_fp8", None)
        (True, False, False)
    """
    return kernel not in BITS or cache in BITS[kernel]


def cache_reason(cache: torch.dtype, facts: DeviceFacts) -> FallbackReason | None:
    """Why a device does not read a cache, or `None`."""
    name = str(cache).removeprefix("torch.")
    if cache not in FP8 or facts.kind == "cpu" or name == facts.fp8_dtype:
        return None
    if facts.fp8_dtype is None:
        return FallbackReason(Fallback.ARCHITECTURE_LACKS, (facts.arch, NO_FP8))
    return FallbackReason(Fallback.DTYPE, name)
