"""What patched layers did since the last `patch`, counted in eager mode and by policies' graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sage_plugin.kernels.attention.prologue.one_pass import OnePass
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.plugin.prologue.unfused import Unfused


@dataclass(eq=False, slots=True)
class LayerCounts:
    """The calls of one layer.

    Attributes:
        calls: by `kernel:variant`.
        fallbacks: calls that stayed with the model's own attention, by reason.
        config_sources: calls by where their launch config came from.
        saved_ms: what calls saved over the baseline, by the times that their configs were tuned
            with.
        timed_calls: how many calls that is the sum of.
        rules: calls by the number of the policy's rule that decided them, from 1.
        rule_steps: the denoising steps of those calls, by rule.
        fused: calls whose norm and rotary embedding of Q and K were one kernel.
        unfused: calls where they were the model's own, by reason.
        in_quantization: calls that quantized Q in the pass of its norm and embedding.
        one_pass: calls where that was a pass of its own, by reason.
    """

    calls: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    config_sources: Counter[str] = field(default_factory=Counter)
    saved_ms: float = 0.0
    timed_calls: int = 0
    rules: Counter[int] = field(default_factory=Counter)
    rule_steps: dict[int, set[int]] = field(default_factory=dict)
    fused: int = 0
    unfused: Counter[Unfused] = field(default_factory=Counter)
    in_quantization: int = 0
    one_pass: Counter[OnePass] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class ComponentCounts:
    """The counts of one component, which another `patch` sets aside.

    Attributes:
        forwards: eager forwards.
        steps: denoising steps that were seen.
        layers: the counts of its layers, by path inside the component.
        linears: those of its linears and experts, likewise.
    """

    forwards: int
    steps: int
    layers: dict[str, LayerCounts]
    linears: dict[str, LayerCounts]
