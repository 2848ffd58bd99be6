"""What runs a linear, and how a call is resolved to it before its data is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from sage_plugin.kernels.contract import Decision, ResolvedConfig
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.linear.activation import quantize_rows
from sage_plugin.kernels.linear.backends.emulation import LinearEmulation
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.linear.call import LinearCall, check_call, check_dtypes
from sage_plugin.kernels.linear.dispatch import decide
from sage_plugin.kernels.linear.launch_space import RULES
from sage_plugin.kernels.linear.quantizer import RowQuantizer, quantizer_of
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue, prologued
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight
from sage_plugin.kernels.linear.weight_memo import quantized_once
from sage_plugin.kernels.resolver import BackendRequest, Resolution, Resolver
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.schema import DeviceFacts, LinearKey, LinearLaunch

Backend = TypeVar("Backend")
Made = TypeVar("Made", bound="ProductExecutor[Any]")


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


class ProductExecutor(Generic[Backend]):
    """What runs the calls of one key of a family of linears.

    Attributes:
        decision: kernel and backend.
        backend: what multiplies; `None` for torch's own product.
        quantizer: what quantizes the input.
        found: the launch config that was looked up; `None` where there is none to look up.
    """

    __slots__ = ("backend", "decision", "found", "quantizer")

    def __init__(
        self,
        decision: Decision,
        backend: Backend | None,
        quantizer: RowQuantizer,
        found: ResolvedConfig | None = None,
    ) -> None:
        self.decision, self.backend, self.quantizer = decision, backend, quantizer
        self.found = found


class LinearExecutor(ProductExecutor[LinearBackend]):
    """What runs the linears of one key."""

    __slots__ = ()

    def run(self, call: LinearCall, prologue: Prologue = NO_PROLOGUE) -> torch.Tensor:
        """Run a call of this key, on what a prologue makes of its input."""
        backend, x, weight = self.backend, call.x, call.weight
        if backend is None:
            return run_by_torch(call, prologue)
        if not isinstance(weight, QuantizedWeight):
            weight = quantized_once(weight, self.decision.kernel, quantize_weight)
        with on_device(x.device), without_autocast(x.device):
            rows = self.rows(call, weight, prologue)
            out = backend.multiply(rows, weight, call.bias, call.out_dtype or x.dtype)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.data.shape[0])

    def rows(
        self, call: LinearCall, weight: QuantizedWeight, prologue: Prologue = NO_PROLOGUE
    ) -> QuantizedRows:
        """Quantize the input of a call for a weight, or find it quantized."""
        if prologue is NO_PROLOGUE:
            return quantize_rows(call.x, weight.row_format, weight.smooth, self.quantizer)
        return self.quantizer(call.x, weight.row_format, weight.smooth, prologue)


def run_by_torch(call: LinearCall, prologue: Prologue = NO_PROLOGUE) -> torch.Tensor:
    """Run a call with its original weight on torch's own linear; traceable.

    Raises:
        UnsupportedInputError: torch's linear does not take its dtypes.
    """
    x, weight, bias, out_dtype = call
    assert isinstance(weight, torch.Tensor)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        check_dtypes(call)
    if prologue is not NO_PROLOGUE:
        x = prologued(x, prologue).to(x.dtype)
    return host_linear(x, weight, bias, out_dtype)


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
Backends = dict[str, Callable[[LinearLaunch], Any]]
"""What makes each backend from a launch config."""


def _checked(call: LinearCall, facts: DeviceFacts, request: BackendRequest) -> Decision:
    check_call(call)
    return decide(call, facts, request)


def tuned_key(call: Any, decision: Decision) -> LinearKey | None:  # noqa: ANN401
    """Return the key of a call of a family of linears whose product is ours."""
    return (
        call.launch_key(decision.kernel, decision.variant) if decision.variant == "triton" else None
    )


def builder(executor: type[Made], backends: Backends) -> Callable[..., Made]:
    """Return what builds the executors of a family of linears."""

    def build(call: Any, _: BackendRequest, found: Resolution) -> Made:  # noqa: ANN401
        decision = found.decision
        make = backends.get(decision.variant)
        backend = None if make is None else make(found.launch)
        quantizer = quantizer_of(call.device, decision.variant)
        return executor(decision, backend, quantizer, found.found)

    return build


def _in_triton(launch: LinearLaunch) -> LinearBackend:
    from sage_plugin.kernels.linear.backends.triton.products import TritonProducts

    return TritonProducts(launch)


BACKENDS: Backends = {
    "emulation": lambda _: LinearEmulation(),
    "torch": lambda _: TorchProducts(asks=True),
    "triton": _in_triton,
}
resolver: Resolver[ResolvedLinear] = Resolver(
    _checked, tuned_key, RULES, builder(LinearExecutor, BACKENDS), Memo(MOST_EXECUTORS)
)
resolve = resolver.resolve
