"""What runs a grouped linear, and how a call is resolved to it before its data is touched."""

from __future__ import annotations

import functools

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.grouped_linear.backends.emulation import multiply_groups_emulated
from sage_plugin.kernels.grouped_linear.backends.torch_products import (
    STRIDE_BYTES,
    finished_groups,
    multiply_groups_torch,
)
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall, check_call
from sage_plugin.kernels.grouped_linear.dispatch import decide
from sage_plugin.kernels.grouped_linear.launch_space import RULES
from sage_plugin.kernels.grouped_linear.operands import (
    GroupedBackend,
    GroupedOperands,
    ends_of,
    zero_tail,
)
from sage_plugin.kernels.grouped_linear.weight import GroupedWeight, quantized_weights_once
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.linear.activation import quantize_rows
from sage_plugin.kernels.linear.dispatch import BASELINE
from sage_plugin.kernels.linear.executor import (
    MOST_EXECUTORS,
    Backends,
    ProductExecutor,
    builder,
    tuned_key,
)
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.resolver import BackendRequest, Resolver
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.schema import DeviceFacts, LinearLaunch


class GroupedExecutor(ProductExecutor[GroupedBackend]):
    """What runs the grouped linears of one key."""

    __slots__ = ()

    def run(self, call: GroupedLinearCall) -> torch.Tensor:
        """Run a call of this key."""
        backend = self.backend
        if backend is None:
            return host_grouped_linear(call)
        where = call.data.device
        with on_device(where), without_autocast(where):
            return backend(self.operands(call), call.dtype)

    def operands(self, call: GroupedLinearCall) -> GroupedOperands:
        """Return what the backend multiplies: in 8 bits, unless the kernel is the 16-bit one."""
        x, weights, group_sizes, bias, _ = call
        if self.decision.kernel == BASELINE:
            assert isinstance(weights, torch.Tensor)
            if self.decision.variant == "triton":
                weights = weights.contiguous()
            return GroupedOperands(call.data.contiguous(), None, weights, None, group_sizes, bias)
        if not isinstance(weights, GroupedWeight):
            weights = quantized_weights_once(weights, self.decision.kernel)
        if not isinstance(x, QuantizedRows):
            x = quantize_rows(x, weights.row_format, None, self.quantizer)
        return GroupedOperands(x.data, x.scale, weights.data, weights.scale, group_sizes, bias)


def host_grouped_linear(call: GroupedLinearCall) -> torch.Tensor:
    """Return torch's own grouped product with the original weights; differentiable, traceable."""
    x, weights, group_sizes, bias, out_dtype = call
    assert isinstance(x, torch.Tensor)
    matrices = weights.dequantized(x.dtype) if isinstance(weights, GroupedWeight) else weights
    if matrices.dtype != x.dtype:
        matrices = matrices.to(x.dtype)
    ends = ends_of(group_sizes, x.shape[0])
    out_features = matrices.shape[1]
    if call.needs_grad:  # whose gradient torch leaves unwritten beyond the groups
        x = zero_tail(x, ends)
    if x.numel() == 0 or matrices.numel() == 0:
        out = x.new_zeros(x.shape[0], out_features)
    else:
        step = STRIDE_BYTES // x.element_size()
        n, k = (-size % step for size in matrices.shape[1:])
        if n or k:
            x = torch.nn.functional.pad(x, (0, k))
            matrices = torch.nn.functional.pad(matrices, (0, k, 0, n))
        x, matrices = (_in_steps(tensor, step) for tensor in (x, matrices))
        out = torch.nn.functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
        out = finished_groups(out[:, :out_features], ends, bias)
    return out if out_dtype is None else out.to(out_dtype)


def _in_steps(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """A tensor as torch's grouped product takes it: one dense dimension, other strides in steps."""
    *batch, rows, columns = tensor.stride()
    if rows == 1:
        rows, columns, width = columns, rows, tensor.shape[-2]
    else:
        width = tensor.shape[-1]
    dense = columns == 1 and rows >= width and not any(one % step for one in (*batch, rows))
    return tensor if dense else tensor.contiguous()


def run(call: GroupedLinearCall, request: BackendRequest) -> torch.Tensor:
    """Run a call in eager mode; torch's own product takes what `auto` leaves.

    Raises:
        UnsupportedInputError: a kernel that was asked for by name, or that has quantized weights,
            cannot take it.
    """
    executor = resolved(call, request)
    return host_grouped_linear(call) if executor is None else executor.run(call)


def resolved(call: GroupedLinearCall, request: BackendRequest) -> GroupedExecutor | None:
    """Return what runs a call in eager mode, `None` for what `auto` leaves to torch.

    Raises:
        UnsupportedInputError: a kernel that was asked for by name, or that has quantized weights,
            cannot take it.
    """
    found = resolve(call, request)
    if not isinstance(found, FallbackReason):
        return found
    if request.kernel != "auto" or isinstance(call.weights, GroupedWeight):
        raise refused(call, request.kernel, str(found))
    return None


def refused(call: GroupedLinearCall, kernel: str, reason: str) -> UnsupportedInputError:
    """Return the error of a kernel that cannot take a call."""
    name = call.weights.kernel if isinstance(call.weights, GroupedWeight) else kernel
    return UnsupportedInputError(
        f"kernel {name!r} cannot take this call: {reason}; use kernel='auto' with the original "
        "weights for torch's own product"
    )


def _checked(call: GroupedLinearCall, facts: DeviceFacts, request: BackendRequest) -> Decision:
    check_call(call)
    return decide(call, facts, request)


def _in_triton(launch: LinearLaunch) -> GroupedBackend:
    from sage_plugin.kernels.grouped_linear.backends.triton.products import multiply_groups_triton

    return functools.partial(multiply_groups_triton, launch=launch)


BACKENDS: Backends = {
    "emulation": lambda _: multiply_groups_emulated,
    "torch": lambda _: multiply_groups_torch,
    "triton": _in_triton,
}
resolver: Resolver[GroupedExecutor | FallbackReason] = Resolver(
    _checked, tuned_key, RULES, builder(GroupedExecutor, BACKENDS), Memo(MOST_EXECUTORS)
)
resolve = resolver.resolve
