"""The decision table: which kernel and backend a grouped linear runs on, or why torch's does.

Everything here is known without data.
"""

from __future__ import annotations

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.grouped_linear.backends import torch_products
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.weight import GroupedWeight
from sage_plugin.kernels.linear.call import FLOATS
from sage_plugin.kernels.linear.dispatch import (
    BASELINE,
    EMPTY,
    GRADIENT,
    ON_CPU,
    automatic_kernel,
    backend_of,
    named,
)
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.support import TORCH_GROUPED, TORCH_GROUPED_FASTEST, device_reason
from sage_plugin.schema import GROUPED_LINEAR_KERNELS, DeviceFacts

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def decide(call: GroupedLinearCall, facts: DeviceFacts, request: BackendRequest) -> Decision:
    """Return which kernel and backend one call runs on.

    Args:
        call: the call; its tensors fit together.
        facts: the device of its tensors.
        request: what was asked for.

    Returns:
        The decision; with a reason where torch's own product takes the call.

    Raises:
        UnknownKernelError: the kernel or the backend is not known.
        UnsupportedInputError: another kernel than that of quantized weights, or a 16-bit product of
            two dtypes.
    """
    quantized = call.weights.kernel if isinstance(call.weights, GroupedWeight) else None
    kernel, backend = named(request, GROUPED_LINEAR_KERNELS, quantized)
    reason = _call_reason(call)
    if kernel == "auto":
        if facts.kind == "cpu" and backend == "auto":
            reason = reason or ON_CPU
        elif call.data.dtype == torch.float32:
            reason = reason or FallbackReason(Fallback.DTYPE, "float32")
        kernel = automatic_kernel(facts)
    if kernel == BASELINE:
        if call.data.dtype != call.matrices.dtype:
            raise UnsupportedInputError(
                f"x is {call.data.dtype} and weights {call.matrices.dtype}; kernel 'bf16' needs "
                "one dtype of both"
            )
        if backend == "auto" and call.data.dtype not in SIXTEEN_BITS:
            return Decision(BASELINE, HOST)
    if reason is None:
        # The 16-bit product runs wherever the unquantized kernel of attention does.
        like = "fav2" if kernel == BASELINE else kernel
        backend, reason = backend_of(
            backend, facts, by_torch=_torch_reason(call, kernel, facts),
            fastest=facts.arch in TORCH_GROUPED_FASTEST[kernel],
            in_triton=device_reason(like, facts),
        )  # fmt: skip
    return Decision(BASELINE, HOST, reason) if reason is not None else Decision(kernel, backend)


def _call_reason(call: GroupedLinearCall) -> FallbackReason | None:
    """Why no kernel takes a call on any hardware, or `None`."""
    if call.needs_grad:
        return GRADIENT
    if isinstance(call.x, torch.Tensor) and call.x.dtype not in FLOATS:
        return FallbackReason(Fallback.DTYPE, str(call.x.dtype).removeprefix("torch."))
    if call.data.numel() == 0 or call.matrices.numel() == 0:
        return EMPTY
    return None


def _torch_reason(
    call: GroupedLinearCall, kernel: str, facts: DeviceFacts
) -> FallbackReason | None:
    """Why torch's own grouped product does not take a call, or `None`."""
    if facts.arch not in TORCH_GROUPED[kernel]:
        return FallbackReason(Fallback.NO_TORCH_PRODUCT, (kernel, facts.arch))
    if kernel == BASELINE and call.data.dtype != torch.bfloat16:
        return FallbackReason(Fallback.DTYPE, str(call.data.dtype).removeprefix("torch."))
    size = call.matrices.element_size() if kernel == BASELINE else 1
    _, out_features, in_features = call.matrices.shape
    if not torch_products.takes(in_features, out_features, size):
        step = torch_products.STRIDE_BYTES // size
        return FallbackReason(Fallback.FEATURES, (in_features, out_features, step))
    return None
