"""Resolve a linear before its data is touched, once per key, and run it."""

from __future__ import annotations

import torch

from sage_plugin import device, settings
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.linear.activation import quantize_rows
from sage_plugin.kernels.linear.backends.emulation import LinearEmulation
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.linear.call import LinearCall, LinearRequest, check_call
from sage_plugin.kernels.linear.dispatch import decide
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.linear.weight_memo import quantized_once
from sage_plugin.kernels.surroundings import on_device, without_autocast

LinearBackend = LinearEmulation | TorchProducts


class LinearExecutor:
    """What runs the calls of one key.

    Attributes:
        decision: kernel and backend.
        backend: what quantizes and multiplies; `None` for torch's own linear.
    """

    __slots__ = ("backend", "decision")

    def __init__(self, decision: Decision, backend: LinearBackend | None) -> None:
        self.decision, self.backend = decision, backend

    def run(self, call: LinearCall) -> torch.Tensor:
        """Run a call of this key."""
        backend = self.backend
        if backend is None:
            assert isinstance(call.weight, torch.Tensor)
            return host_linear(call.x, call.weight, call.bias, call.out_dtype)
        x, weight = call.x, call.weight
        with on_device(x.device), without_autocast(x.device), torch.no_grad():
            if not isinstance(weight, QuantizedWeight):
                weight = quantized_once(weight, self.decision.kernel)
            rows = quantize_rows(x, weight.row_format, weight.smooth, backend.quantize)
            out = backend.multiply(rows, weight, call.bias, call.out_dtype or x.dtype)
        return out.view(*x.shape[:-1], weight.out_features)


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
    """
    key = (call.key(), request, settings.of_calls())
    answer = _resolved.get(key)
    if answer is None:
        answer = _resolve(call, request)
        _resolved.keep(key, answer)
    return answer


def _resolve(call: LinearCall, request: LinearRequest) -> ResolvedLinear:
    check_call(call)
    facts = device.facts_of(call.x.device.type, call.x.device.index)
    decision = decide(call, facts, request)
    if decision.reason is not None:
        return decision.reason
    return LinearExecutor(decision, None if decision.variant == HOST else _built(decision.variant))


def _built(backend: str) -> LinearBackend:
    return LinearEmulation() if backend == "emulation" else TorchProducts()
