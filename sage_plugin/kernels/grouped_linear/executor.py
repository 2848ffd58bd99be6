"""Resolve a grouped linear before its data is touched, once per key, and run it."""

from __future__ import annotations

import torch

from sage_plugin import device, settings
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.contract import HOST, Decision, ResolvedConfig
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.grouped_linear.backends.emulation import GroupedEmulation
from sage_plugin.kernels.grouped_linear.backends.torch_products import (
    STRIDE_BYTES,
    GroupedTorchProducts,
    finished_groups,
)
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall, check_call
from sage_plugin.kernels.grouped_linear.dispatch import decide
from sage_plugin.kernels.grouped_linear.launch_space import find_launch, illegal_reason
from sage_plugin.kernels.grouped_linear.operands import (
    GroupedBackend,
    GroupedOperands,
    ends_of,
    zero_tail,
)
from sage_plugin.kernels.grouped_linear.weight import GroupedWeight, quantized_weights_once
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.linear.activation import quantize_rows
from sage_plugin.kernels.linear.call import LinearRequest
from sage_plugin.kernels.linear.dispatch import BASELINE
from sage_plugin.kernels.linear.executor import MOST_EXECUTORS, check_place
from sage_plugin.kernels.linear.quantizer import RowQuantizer, quantizer_of
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.schema import DeviceFacts, LinearKey


class GroupedExecutor:
    """What runs the calls of one key.

    Attributes:
        decision: kernel and backend.
        backend: what multiplies; `None` for torch's own product.
        quantizer: what quantizes the input.
        found: the launch config that was looked up, `None` for none.
    """

    __slots__ = ("backend", "decision", "found", "quantizer")

    def __init__(
        self,
        decision: Decision,
        backend: GroupedBackend | None,
        quantizer: RowQuantizer,
        found: ResolvedConfig | None = None,
    ) -> None:
        self.decision, self.backend, self.quantizer = decision, backend, quantizer
        self.found = found

    def run(self, call: GroupedLinearCall) -> torch.Tensor:
        """Run a call of this key."""
        backend = self.backend
        if backend is None:
            return host_grouped_linear(call)
        where = call.data.device
        with on_device(where), without_autocast(where):
            return backend.multiply(self.operands(call), call.dtype)

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
        out = torch.nn.functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
        out = finished_groups(out[:, :out_features], ends, bias)
    return out if out_dtype is None else out.to(out_dtype)


def run(call: GroupedLinearCall, request: LinearRequest) -> torch.Tensor:
    """Run a call in eager mode; torch's own product takes what `auto` leaves.

    Raises:
        UnsupportedInputError: a kernel that was asked for by name, or that has quantized weights,
            cannot take it.
    """
    executor = resolved(call, request)
    return host_grouped_linear(call) if executor is None else executor.run(call)


def resolved(call: GroupedLinearCall, request: LinearRequest) -> GroupedExecutor | None:
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


ResolvedGrouped = GroupedExecutor | FallbackReason
_resolved: Memo[ResolvedGrouped] = Memo(MOST_EXECUTORS)


def resolve(call: GroupedLinearCall, request: LinearRequest) -> ResolvedGrouped:
    """Return what runs a call, or why it stays with torch's own product; eager mode only.

    Raises:
        UnsupportedInputError: tensors that do not fit together.
        UnknownKernelError: no kernel or backend of that name.
        ConfigError: the environment's launch config is not legal.
    """
    key = (call.key(), request, settings.of_calls())
    answer = _resolved.get(key)
    if answer is None:
        answer = _resolve(call, request)
        interpreted = isinstance(answer, GroupedExecutor) and answer.decision.variant == "triton"
        if not interpreted or call.data.device.type != "cpu":  # that depends on TRITON_INTERPRET
            _resolved.keep(key, answer)
    return answer


def _resolve(call: GroupedLinearCall, request: LinearRequest) -> ResolvedGrouped:
    check_call(call)
    where = call.data.device
    facts = device.facts_of(where.type, where.index)
    decision = decide(call, facts, request)
    if decision.reason is not None:
        return decision.reason
    quantizer = quantizer_of(where, decision.variant)
    if decision.variant == HOST:
        return GroupedExecutor(decision, None, quantizer)
    backend, found = _built(decision, call, request, facts)
    return GroupedExecutor(decision, backend, quantizer, found)


def _built(
    decision: Decision, call: GroupedLinearCall, request: LinearRequest, facts: DeviceFacts
) -> tuple[GroupedBackend, ResolvedConfig | None]:
    """The backend that was decided for, and the launch config that was looked up for it.

    Raises:
        UnsupportedInputError: Triton on a CPU, or an illegal launch config.
    """
    if decision.variant == "emulation":
        return GroupedEmulation(), None
    if decision.variant == "torch":
        return GroupedTorchProducts(), None
    check_place(decision, facts)
    groups, out_features, in_features = call.matrices.shape
    dtype = str(call.dtype).removeprefix("torch.")
    key = LinearKey(
        decision.kernel, decision.variant, in_features, out_features, dtype, call.data.shape[0],
        groups,
    )  # fmt: skip
    found = None
    if request.launch is None:
        found = find_launch(key, facts, config_dir=request.config_dir)
    launch = request.launch if found is None else found.config
    assert launch is not None
    reason = illegal_reason(launch, key, facts)
    if reason is not None:
        raise UnsupportedInputError(f"launch config {launch.text()}: {reason}")
    from sage_plugin.kernels.grouped_linear.backends.triton.backend import GroupedTritonProducts

    return GroupedTritonProducts(launch), found
