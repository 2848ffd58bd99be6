"""What patched layers did: calls by kernel, fallbacks by reason, configs by origin."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sage_plugin.errors import PatchError
from sage_plugin.kernels.attention.prologue.one_pass import OnePass
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.plugin import report_text
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.context import LayerContext
from sage_plugin.plugin.linears import report as of_linears
from sage_plugin.plugin.linears.report import LinearReport
from sage_plugin.plugin.owners import parts_of
from sage_plugin.plugin.prologue.unfused import Unfused

HOST_KERNELS = ("sdpa:host",)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Counts of one layer; calls inside compiled graphs are not counted.

    `layer` is its module path with the component in front; the other fields are those of
    `LayerCounts`, with the steps of a rule in their order.
    """

    layer: str
    calls: dict[str, int]
    fallbacks: dict[FallbackReason, int]
    config_sources: dict[str, int]
    saved_ms: float = 0.0
    timed_calls: int = 0
    rules: dict[int, int] = field(default_factory=dict)
    rule_steps: dict[int, tuple[int, ...]] = field(default_factory=dict)
    fused: int = 0
    unfused: dict[Unfused, int] = field(default_factory=dict)
    in_quantization: int = 0
    one_pass: dict[OnePass, int] = field(default_factory=dict)

    def total_calls(self) -> int:
        """All calls of the layer."""
        return sum(self.calls.values()) + sum(self.fallbacks.values())

    def kernel_calls(self) -> int:
        """Calls that ran on a kernel, not on the model's own attention."""
        return sum(n for label, n in self.calls.items() if label not in HOST_KERNELS)


@dataclass(frozen=True, slots=True)
class PluginReport:
    """Counts of all layers since the last `patch`.

    Attributes:
        rows: one report a layer, in the model's order.
        skipped: attention layers that are not patched, and why.
        lost: patched layers whose processor or module was replaced since.
        idle_rules: rules of the policy that no call has met, as text.
        forwards: eager forwards of the patched models.
        steps: denoising steps that a policy has seen; 0 where nobody counted them.
        linears: one report a patched linear.
        linears_left: linears that run as ever, and why; empty where none are patched.
    """

    rows: tuple[LayerReport, ...]
    skipped: dict[str, str]
    lost: tuple[str, ...]
    idle_rules: tuple[str, ...] = ()
    forwards: int = 0
    steps: int = 0
    linears: tuple[LinearReport, ...] = ()
    linears_left: dict[str, str] = field(default_factory=dict)

    def total_calls(self) -> int:
        """All calls of all layers."""
        return sum(row.total_calls() for row in self.rows)

    def kernel_calls(self) -> int:
        """Calls that ran on a kernel, not on the model's own attention."""
        return sum(row.kernel_calls() for row in self.rows)

    def fused_calls(self) -> int:
        """Calls whose norm and rotary embedding of Q and K were one kernel."""
        return sum(row.fused for row in self.rows)

    def saved_ms(self) -> float:
        """Milliseconds saved over the baseline in the calls whose configs were timed."""
        attention = sum(row.saved_ms for row in self.rows)
        return attention + sum(row.saved_ms for row in self.linears)

    def saved_bytes(self) -> int:
        """Memory that weights of linears take less on their devices."""
        return sum(row.saved_bytes for row in self.linears)

    def text(self, *, every_layer: bool = False) -> str:
        """The report for a terminal of 80 columns, equal layers together.

        Args:
            every_layer: give each layer lines of its own.
        """
        return report_text.render(self, every_layer=every_layer)


def report(obj: object) -> PluginReport:
    """What the patched layers of a pipeline or model did so far.

    Raises:
        PatchError: `obj` is not patched.

    Example:
        >>> import torch, sage_plugin
        >>> from diffusers.models.attention_processor import Attention
        >>> layer = torch.nn.ModuleDict({"attn": Attention(query_dim=8, heads=2, dim_head=4)})
        >>> with sage_plugin.patched(layer):
        ...     sage_plugin.report(layer).total_calls()
        0
    """
    parts = parts_of(obj)
    if not parts:
        raise PatchError(
            f"{type(obj).__name__} is not patched; call sage_plugin.patch() on it, or .report() on "
            "the handle of an earlier patch"
        )
    return report_of(parts)


def row_of(layer: LayerContext) -> LayerReport:
    """What one layer did."""
    counts = {f.name: getattr(layer.counts, f.name) for f in dataclasses.fields(layer.counts)}
    plain: dict[str, Any]
    plain = {name: dict(x) if isinstance(x, Counter) else x for name, x in counts.items()}
    steps = {rule: tuple(sorted(seen)) for rule, seen in layer.counts.rule_steps.items()}
    return LayerReport(layer.name, **(plain | {"rule_steps": steps}))


def report_of(parts: Iterable[Component]) -> PluginReport:
    """The report of some components."""
    parts = list(parts)
    whole = joined(
        PluginReport(
            tuple(row_of(layer) for layer in part.layers.values()),
            part.left_out(),
            part.lost(),
            forwards=part.state.forwards.count,
            linears=tuple(
                of_linears.row_of(layer)
                for group in (part.linears.layers.values(), part.experts.layers.values())
                for layer in group
            ),
            linears_left=part.linears_left(),
        )
        for part in parts
    )
    trackers = {t for part in parts if (t := part.state.tracker) is not None}
    return dataclasses.replace(
        whole, idle_rules=tuple(_idle_rules(parts)), steps=sum(t.passed for t in trackers)
    )


def _idle_rules(parts: list[Component]) -> Iterator[str]:
    """Rules of the parts' policy that decided no call of any of them."""
    policies = {id(p): p for part in parts if (p := part.state.options.policy) is not None}
    for policy in policies.values():
        met = {
            number
            for part in parts
            if part.state.options.policy is policy
            for counts in part.every_count()
            for number in counts.rules
        }
        for number, rule in enumerate(policy.rules, start=1):
            if number not in met and rule.op != PAGED_ATTENTION:
                steps = f" at steps {rule.steps}" if rule.steps else ""
                yield f"rule {number} ({rule.label} on {', '.join(rule.layers)}{steps})"


def joined(reports: Iterable[PluginReport]) -> PluginReport:
    """Several reports as one."""
    every = list(reports)
    return PluginReport(
        tuple(row for one in every for row in one.rows),
        dict(ChainMap(*(one.skipped for one in reversed(every)))),
        tuple(name for one in every for name in one.lost),
        tuple(rule for one in every for rule in one.idle_rules),
        sum(one.forwards for one in every),
        max((one.steps for one in every), default=0),
        tuple(row for one in every for row in one.linears),
        dict(ChainMap(*(one.linears_left for one in reversed(every)))),
    )
