"""Resolve a linear before its data is touched, once per key, and run it."""

from __future__ import annotations

from typing import Protocol

import torch

from sage_plugin import device, settings
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.contract import HOST, Decision, ResolvedConfig
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.linear.activation import quantize_rows
from sage_plugin.kernels.linear.backends.emulation import LinearEmulation
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.linear.call import LinearCall, LinearRequest, check_call
from sage_plugin.kernels.linear.dispatch import decide
from sage_plugin.kernels.linear.launch_space import find_launch, illegal_reason
from sage_plugin.kernels.linear.quantizer import RowQuantizer, quantizer_of
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight
from sage_plugin.kernels.linear.weight_memo import quantized_once
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.schema import DeviceFacts, LinearKey


class LinearBackend(Protocol):
    """What multiplies quantized rows with a weight."""

    def multiply(
        self,
        rows: QuantizedRows,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the `(M, N)` output of `(M, K)` rows and a `(N, K)` weight."""


class LinearExecutor:
    """What runs the calls of one key.

    Attributes:
        decision: kernel and backend.
        backend: what multiplies; `None` for torch's own linear.
        quantizer: what quantizes the input.
        found: the launch config that was looked up; `None` where there is none to look up.
    """

    __slots__ = ("backend", "decision", "found", "quantizer")

    def __init__(
        self,
        decision: Decision,
        backend: LinearBackend | None,
        quantizer: RowQuantizer,
        found: ResolvedConfig | None = None,
    ) -> None:
        self.decision, self.backend, self.quantizer = decision, backend, quantizer
        self.found = found

    def run(self, call: LinearCall, prologue: Prologue = NO_PROLOGUE) -> torch.Tensor:
        """Run a call of this key, on what a prologue makes of its input."""
        backend = self.backend
        if backend is None:
            assert isinstance(call.weight, torch.Tensor)
            return host_linear(call.x, call.weight, call.bias, call.out_dtype)
        x, weight = call.x, call.weight
        if not isinstance(weight, QuantizedWeight):
            weight = quantized_once(weight, self.decision.kernel, quantize_weight)
        with on_device(x.device), without_autocast(x.device):
            rows = self.rows(call, weight, prologue)
            out = backend.multiply(rows, weight, call.bias, call.out_dtype or x.dtype)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.data.shape[0])

    def rows(
        self,
        call: LinearCall,
        weight: QuantizedWeight,
        prologue: Prologue = NO_PROLOGUE,
        kept: torch.Tensor | None = None,
    ) -> QuantizedRows:
        """Quantize the input of a call for a weight, or find it quantized.

        Args:
            call: the call.
            weight: its weight.
            prologue: what comes before.
            kept: where the rows go too, before they are smoothed.
        """
        x = call.x
        if prologue is NO_PROLOGUE:
            return quantize_rows(x, weight.row_format, weight.smooth, self.quantizer)
        with on_device(x.device), without_autocast(x.device):
            return self.quantizer(x, weight.row_format, weight.smooth, prologue, kept)


def host_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return torch's own linear."""
    out = torch.nn.functional.linear(x, weight, bias)
    return out if out_dtype is None else out.to(out_dtype)


MOST_EXECUTORS = 4096
"""Some 300 bytes each. A language model's prompts have new lengths, at a few keys of weights."""

ResolvedLinear = LinearExecutor | FallbackReason
_resolved: Memo[ResolvedLinear] = Memo(MOST_EXECUTORS)


def resolve(call: LinearCall, request: LinearRequest) -> ResolvedLinear:
    """Return what runs a call, or why it stays with torch's own linear; eager mode only.

    Raises:
        UnsupportedInputError: tensors that do not fit together.
        UnknownKernelError: no kernel or backend of that name.
        ConfigError: the environment's launch config is not legal.
    """
    key = (call.key(), request, settings.of_calls())
    answer = _resolved.get(key)
    if answer is None:
        answer = _resolve(call, request)
        interpreted = isinstance(answer, LinearExecutor) and answer.decision.variant == "triton"
        if not interpreted or call.x.device.type != "cpu":  # that depends on TRITON_INTERPRET
            _resolved.keep(key, answer)
    return answer


def _resolve(call: LinearCall, request: LinearRequest) -> ResolvedLinear:
    check_call(call)
    where = call.x.device
    facts = device.facts_of(where.type, where.index)
    decision = decide(call, facts, request)
    if decision.reason is not None:
        return decision.reason
    quantizer = quantizer_of(where, decision.variant)
    if decision.variant == HOST:
        return LinearExecutor(decision, None, quantizer)
    backend, found = _built(decision, call, request, facts)
    return LinearExecutor(decision, backend, quantizer, found)


def _built(
    decision: Decision, call: LinearCall, request: LinearRequest, facts: DeviceFacts
) -> tuple[LinearBackend, ResolvedConfig | None]:
    """The backend that was decided for, and the launch config that was looked up for it.

    Raises:
        UnsupportedInputError: Triton on a CPU, or an illegal launch config.
    """
    if decision.variant == "emulation":
        return LinearEmulation(), None
    if decision.variant == "torch":
        return TorchProducts(asks=True), None
    check_place(decision, facts)
    out_features, in_features = call.matrix.shape
    dtype = str(call.x.dtype).removeprefix("torch.")
    key = LinearKey(decision.kernel, decision.variant, in_features, out_features, dtype, call.rows)
    found = None
    if request.launch is None:
        found = find_launch(key, facts, config_dir=request.config_dir)
    launch = request.launch if found is None else found.config
    assert launch is not None
    reason = illegal_reason(launch, key, facts)
    if reason is not None:
        raise UnsupportedInputError(f"launch config {launch.text()}: {reason}")
    from sage_plugin.kernels.linear.backends.triton.backend import TritonProducts

    return TritonProducts(launch), found


def check_place(decision: Decision, facts: DeviceFacts) -> None:
    """Raise where Triton is asked for on a CPU, unless its interpreter runs it.

    Raises:
        UnsupportedInputError: it is.
    """
    if facts.kind == "cpu" and not settings.triton_interpreted():
        raise UnsupportedInputError(
            f"kernel {decision.label} needs a GPU and the tensors are on the CPU; use "
            "backend='emulation', or set TRITON_INTERPRET=1 before Triton is imported"
        )
