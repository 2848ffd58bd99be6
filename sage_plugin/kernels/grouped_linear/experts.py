"""The experts of a mixture as two grouped linears on quantized rows, with what lies between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.executor import GroupedExecutor, resolved, run
from sage_plugin.kernels.grouped_linear.routing import combined, routing_of
from sage_plugin.kernels.grouped_linear.torch_ops import traced_product
from sage_plugin.kernels.grouped_linear.weight import GroupedWeight
from sage_plugin.kernels.linear.quantizer import quantizer_of
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.linear.traced import traced_rows
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.surroundings import are_plain, on_device, without_autocast

AUTO = BackendRequest()


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The weights of a mixture's experts.

    Attributes:
        up: `(E, 2I, H)`, the gates' channels before the others; `(E, I, H)` without gates.
        down: `(E, H, I)`.
        up_bias: `(E, 2I)` or `(E, I)`, or `None`.
        down_bias: `(E, H)`, or `None`.
        between: makes `(T, I)` of the first product; `None` for `silu(gate) * up`, which is
            computed in the pass that quantizes it.
    """

    up: GroupedWeight
    down: GroupedWeight
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    between: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def kernel(self) -> str:
        """The kernel that multiplies them."""
        return self.up.kernel

    @property
    def label(self) -> str:
        """The same, as reports name it: experts are neither rotated nor smoothed."""
        return self.kernel

    @property
    def nbytes(self) -> int:
        """Bytes of the 8-bit weights."""
        return self.up.nbytes + self.down.nbytes

    def to(self, device: torch.device | str) -> Experts:
        """Return the experts on a device."""
        up_bias, down_bias = (
            None if bias is None else bias.to(device) for bias in (self.up_bias, self.down_bias)
        )
        return Experts(
            self.up.to(device), self.down.to(device), up_bias, down_bias, between=self.between
        )


def run_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    request: BackendRequest = AUTO,
    ran: list[GroupedExecutor] | None = None,
) -> torch.Tensor:
    """Send tokens through their experts; traceable, and nothing is read on the host.

    A token is quantized once for all of its experts.

    Args:
        x: `(S, H)`.
        chosen: `(S, k)` experts of each token; E or more for one that is elsewhere, which adds 0.
        weights: `(S, k)` of the sum.
        experts: what they go through.
        request: where launch configs are looked up.
        ran: gets what ran both products, in eager mode.

    Returns:
        `(S, H)`.
    """
    routing = routing_of(chosen, experts.up.groups)
    dtype, sizes = x.dtype, routing.group_sizes
    rows = _quantized(x, experts.up.row_format, copies=routing.places)
    inner = _product(rows, experts.up, sizes, experts.up_bias, dtype, request, ran)
    if experts.between is None:
        gate, up = inner.chunk(2, dim=-1)
        rows = _quantized(up, experts.down.row_format, Prologue("swiglu", gate=gate))
    else:
        rows = _quantized(experts.between(inner), experts.down.row_format)
    out = _product(rows, experts.down, sizes, experts.down_bias, dtype, request, ran)
    return combined(out, weights, routing, dtype)


def _quantized(
    x: torch.Tensor,
    form: RowFormat,
    prologue: Prologue = NO_PROLOGUE,
    copies: torch.Tensor | None = None,
) -> QuantizedRows:
    """Rows in 8 bits, each in all of its places."""
    if not are_plain(x, *prologue.tensors()):
        rows = traced_rows(x, form, None, prologue)
        return rows if copies is None else rows.copied(copies)
    with on_device(x.device), without_autocast(x.device):
        return quantizer_of(x.device)(x, form, None, prologue, None, copies)


def _product(
    rows: QuantizedRows,
    weights: GroupedWeight,
    group_sizes: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    request: BackendRequest,
    ran: list[GroupedExecutor] | None,
) -> torch.Tensor:
    if not are_plain(rows.data, group_sizes, bias):
        return traced_product(rows, weights, group_sizes, bias, dtype, request.config_dir)
    call = GroupedLinearCall(rows, weights, group_sizes, bias, dtype)
    if ran is None:
        return run(call, request)
    executor = resolved(call, request)
    assert executor is not None, "quantized weights have no other way"
    ran.append(executor)
    return executor.run(call)
