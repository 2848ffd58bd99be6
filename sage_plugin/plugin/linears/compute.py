"""The way from a patched linear to the kernels of `sage_plugin.kernels.linear`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin import device
from sage_plugin.kernels.contract import ResolvedConfig
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.linear.activation import can_be_remembered, quantize_norm
from sage_plugin.kernels.linear.call import LinearCall
from sage_plugin.kernels.linear.dispatch import decide
from sage_plugin.kernels.linear.executor import resolve
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE, Prologue
from sage_plugin.kernels.linear.rows.row_format import rotation_of
from sage_plugin.kernels.linear.traced import traced_linear
from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.surroundings import are_plain, wants_gradient
from sage_plugin.plugin.counts import LayerCounts

__all__ = [
    "Answer",
    "count_config",
    "kernel_for",
    "kernel_on",
    "quantize_norm",
    "quantize_weight",
    "rotation_of",
    "run",
    "traced",
    "wants_gradient",
]

MANY_ROWS = 1 << 16
"""Rows of a call by which a kernel is chosen for a weight; a call of few rows runs on it too, as
the original is not there."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a kernel made of one call.

    Attributes:
        out: the output.
        label: `kernel:backend`, and what was fused into its quantization.
        found: the launch config that was looked up, `None` for none.
    """

    out: torch.Tensor
    label: str
    found: ResolvedConfig | None = None

    def count(self, counts: LayerCounts, rule: int) -> None:
        """Enter the call."""
        counts.calls[self.label] += 1
        count_config(counts, self.found)
        if rule:
            counts.rules[rule] += 1


def count_config(counts: LayerCounts, found: ResolvedConfig | None) -> None:
    """Enter the launch config of a product, `None` for one that has none."""
    if found is not None:
        counts.config_sources[found.mark] += 1
        if found.saved_ms is not None:
            counts.saved_ms += found.saved_ms
            counts.timed_calls += 1


def kernel_for(weight: torch.Tensor, kernel: str) -> str | FallbackReason:
    """The kernel that multiplies a weight where it is, or why none does.

    Args:
        weight: `(N, K)`.
        kernel: by name, or `"auto"`.
    """
    return kernel_on(weight.device, kernel, weight.detach())


def kernel_on(
    place: torch.device, kernel: str, weight: torch.Tensor | QuantizedWeight
) -> str | FallbackReason:
    """The kernel that multiplies a weight on a device, or why none does."""
    matrix = weight.data if isinstance(weight, QuantizedWeight) else weight
    dtype = torch.bfloat16 if isinstance(weight, QuantizedWeight) else weight.dtype
    x = torch.empty(MANY_ROWS, matrix.shape[1], dtype=dtype, device="meta")
    facts = device.facts_of(place.type, place.index)
    decision = decide(LinearCall(x, matrix), facts, BackendRequest(kernel))
    return decision.kernel if decision.reason is None else decision.reason


def run(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    request: BackendRequest,
    prologue: Prologue = NO_PROLOGUE,
) -> Answer | FallbackReason:
    """Multiply in eager mode.

    Args:
        x: `(..., K)`.
        weight: the 8-bit weight.
        bias: `(N,)`.
        request: where launch configs are looked up.
        prologue: what comes before the quantization, in the same pass.
    """
    x = _as_autocast_has_it(x)
    fused = "" if prologue is NO_PROLOGUE else f"+{prologue.kind}"
    if not are_plain(x, bias):
        out = traced_linear(x, weight, bias, None, prologue, request.config_dir)
        return Answer(out, f"{weight.kernel}:traced{fused}")
    call = LinearCall(x, weight, bias)
    resolved = resolve(call, request)
    if isinstance(resolved, FallbackReason):
        return resolved
    out = resolved.run(call, prologue)
    return Answer(out, resolved.decision.label + fused, resolved.found)


def can_wait(x: torch.Tensor) -> bool:
    """Whether what is made of a tensor may be made later, and remembered for its readers."""
    watched = torch.is_inference_mode_enabled() or not are_plain(x)
    return x.numel() > 0 and not watched and can_be_remembered(x)


def traced(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    request: BackendRequest,
    prologue: Prologue = NO_PROLOGUE,
) -> torch.Tensor:
    """Multiply in a graph, by torch operations."""
    x = _as_autocast_has_it(x)
    return traced_linear(x, weight, bias, None, prologue, request.config_dir)


def _as_autocast_has_it(x: torch.Tensor) -> torch.Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
