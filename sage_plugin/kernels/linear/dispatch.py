"""The decision table: which kernel and backend a linear runs on, or why torch's own does.

Everything here is known without data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sage_plugin.errors import UnsupportedInputError, check_name
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.linear.backends import torch_products
from sage_plugin.kernels.linear.call import FLOATS, LinearCall
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.support import (
    FP8_LINEARS,
    TORCH_FP8,
    TORCH_FP8_FASTEST,
    device_reason,
    fewest_out_features,
    fewest_products,
    torch_alignment,
)
from sage_plugin.schema import LINEAR_BACKENDS, LINEAR_KERNELS, DeviceFacts

BASELINE = "bf16"
ON_CPU = FallbackReason(Fallback.LINEAR_ON_CPU)
GRADIENT = FallbackReason(Fallback.GRADIENT)
EMPTY = FallbackReason(Fallback.EMPTY)
SMALL_LINEAR = FallbackReason(Fallback.SMALL_LINEAR)


def automatic_kernel(facts: DeviceFacts) -> str:
    """Return the kernel that `auto` stands for on a device, where it takes a call at all."""
    return "int8_row" if facts.fp8_dtype is None else "fp8_row"


def decide(call: LinearCall, facts: DeviceFacts, request: BackendRequest) -> Decision:
    """Return which kernel and backend one call runs on.

    Args:
        call: the call; its tensors fit together.
        facts: the device of its tensors.
        request: what was asked for.

    Returns:
        The decision; with a reason where torch's own linear takes the call.

    Raises:
        UnknownKernelError: the kernel or the backend is not known.
        UnsupportedInputError: another kernel than that of a quantized weight.
    """
    quantized = call.weight.kernel if isinstance(call.weight, QuantizedWeight) else None
    kernel, backend = named(request, LINEAR_KERNELS, quantized)
    automatic = kernel == "auto"
    if kernel == BASELINE:
        return Decision(BASELINE, HOST)
    if automatic:
        if facts.kind == "cpu" and backend == "auto":
            return _left(ON_CPU)
        kernel = automatic_kernel(facts)
    reason = _call_reason(call)
    if automatic and reason is None:
        reason = _left_by_auto(call, facts)
    if reason is None:
        backend, reason = backend_of(
            backend, facts, by_torch=_torch_reason(call, kernel, facts),
            fastest=kernel in FP8_LINEARS and facts.arch in TORCH_FP8_FASTEST,
            in_triton=device_reason(kernel, facts),
        )  # fmt: skip
    return _left(reason) if reason is not None else Decision(kernel, backend)


def named(
    request: BackendRequest, kernels: Sequence[str], quantized: str | None
) -> tuple[str, str]:
    """Return the kernel and the backend of a request, which exist.

    Args:
        request: what was asked for.
        kernels: those that there are.
        quantized: the kernel of a quantized weight, `None` for another.

    Raises:
        UnknownKernelError: one of them does not exist.
        UnsupportedInputError: another kernel than that of the weight.
    """
    kernel, backend = request.kernel, request.backend
    check_name("kernel", kernel, kernels)
    check_name("backend", backend, LINEAR_BACKENDS)
    if quantized is not None and kernel not in ("auto", quantized):
        raise UnsupportedInputError(
            f"kernel {kernel!r} cannot multiply weights of {quantized!r}; quantize the original "
            "weights for it"
        )
    return quantized or kernel, backend


def backend_of(
    backend: str,
    facts: DeviceFacts,
    *,
    by_torch: FallbackReason | None,
    fastest: bool,
    in_triton: FallbackReason | None,
) -> tuple[str, FallbackReason | None]:
    """Return the backend that multiplies, or the one asked for and why it cannot.

    Args:
        backend: the one asked for, or `"auto"`.
        facts: the device.
        by_torch: why torch's product does not take the call, or `None`.
        fastest: whether torch's product is the fastest there.
        in_triton: why ours does not.
    """
    if backend == "emulation" or (backend == "auto" and facts.kind == "cpu"):
        return "emulation", None
    if backend == "torch" or (backend == "auto" and fastest and by_torch is None):
        return "torch", by_torch
    return "triton", in_triton


def _left(reason: FallbackReason) -> Decision:
    return Decision(BASELINE, HOST, reason)


def _call_reason(call: LinearCall) -> FallbackReason | None:
    """Why no quantized kernel takes a call on any hardware, or `None`."""
    if call.needs_grad:
        return GRADIENT
    if call.x.dtype not in FLOATS:
        return FallbackReason(Fallback.DTYPE, str(call.x.dtype).removeprefix("torch."))
    if call.x.numel() == 0 or call.matrix.shape[0] == 0:
        return EMPTY
    return None


def _left_by_auto(call: LinearCall, facts: DeviceFacts) -> FallbackReason | None:
    """Why `auto` leaves a call that a kernel could take to torch's own linear, or `None`."""
    if call.x.dtype == torch.float32:
        return FallbackReason(Fallback.DTYPE, "float32")
    out_features, in_features = call.matrix.shape
    if out_features < fewest_out_features(facts.arch):
        return SMALL_LINEAR
    if call.rows * in_features * out_features < fewest_products(facts.arch):
        return SMALL_LINEAR
    return None


def _torch_reason(call: LinearCall, kernel: str, facts: DeviceFacts) -> FallbackReason | None:
    """Why torch's own product does not take a call, or `None`."""
    if kernel in FP8_LINEARS and facts.kind != "cpu" and facts.arch not in TORCH_FP8:
        return FallbackReason(Fallback.NO_TORCH_PRODUCT, (kernel, facts.arch))
    if kernel == "fp8_row" and facts.kind == "cpu" and not torch_products.ROW_SCALES_ON_CPU:
        return FallbackReason(Fallback.NO_TORCH_PRODUCT, (kernel, facts.arch))
    out_features, in_features = call.matrix.shape
    int8 = kernel == "int8_row"
    step = torch_alignment(int8=int8)
    if facts.kind != "cpu" and (in_features | out_features) % step:
        return FallbackReason(Fallback.FEATURES, (in_features, out_features, step))
    return None
