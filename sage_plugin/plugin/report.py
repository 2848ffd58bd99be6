"""What patched layers did: calls by kernel, fallbacks by reason, configs by origin."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sage_plugin.errors import PatchError
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.context import LayerContext
from sage_plugin.plugin.owners import parts_of

HOST_KERNELS = ("sdpa:host",)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Counts of one layer; calls inside compiled graphs are not counted.

    Attributes:
        layer: module path with the component in front.
        calls: calls by `kernel:variant`, as chosen.
        fallbacks: calls that went to the host's attention instead, by reason.
        config_sources: calls by where their launch config came from.
        saved_ms: milliseconds saved over the host's attention, by the times that the configs were
            tuned with; 0 where none were.
        timed_calls: how many of the calls that is the sum of.
        rules: calls by the number of the policy's rule that decided them, from 1.
        rule_steps: the denoising steps of those calls, by rule.
    """

    layer: str
    calls: dict[str, int]
    fallbacks: dict[FallbackReason, int]
    config_sources: dict[str, int]
    saved_ms: float = 0.0
    timed_calls: int = 0
    rules: dict[int, int] = field(default_factory=dict)
    rule_steps: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def total_calls(self) -> int:
        """All calls of the layer."""
        return sum(self.calls.values()) + sum(self.fallbacks.values())

    def kernel_calls(self) -> int:
        """Calls that ran on a kernel, not on the host's attention."""
        return sum(n for label, n in self.calls.items() if label not in HOST_KERNELS)


@dataclass(frozen=True, slots=True)
class PluginReport:
    """Counts of all layers of a patch.

    Attributes:
        rows: one report a layer, in the model's order.
        skipped: attention layers that are not patched, and why.
        lost: patched layers whose processor or module was replaced since.
        idle_rules: rules of the policy that no call has met, as text.
    """

    rows: tuple[LayerReport, ...]
    skipped: dict[str, str]
    lost: tuple[str, ...]
    idle_rules: tuple[str, ...] = ()

    def total_calls(self) -> int:
        """All calls of all layers."""
        return sum(row.total_calls() for row in self.rows)

    def kernel_calls(self) -> int:
        """Calls that ran on a kernel, not on the host's attention."""
        return sum(row.kernel_calls() for row in self.rows)

    def saved_ms(self) -> float:
        """Milliseconds saved over the host's attention in the calls whose configs were timed."""
        return sum(row.saved_ms for row in self.rows)

    def text(self) -> str:
        """A plain table."""
        width = max([len("layer"), *(len(row.layer) for row in self.rows)])
        lines = [f"{'layer':<{width}}  calls  on a kernel  how"]
        lines += [
            f"{row.layer:<{width}}  {row.total_calls():>5}  {row.kernel_calls():>11}  {_how(row)}"
            for row in self.rows
        ]
        lines.append(
            f"{self.kernel_calls()} of {self.total_calls()} calls ran on a kernel "
            "(calls inside compiled graphs are not counted)"
        )
        if timed := sum(row.timed_calls for row in self.rows):
            lines.append(
                f"about {self.saved_ms():.1f} ms saved over the host's attention in {timed} of "
                "them, by the times that their configs were tuned with"
            )
        lines += [f"not patched: {name} ({why})" for name, why in self.skipped.items()]
        lines += [
            f"patch lost: {name} (its processor or module was replaced)" for name in self.lost
        ]
        lines += [f"never met: {rule}" for rule in self.idle_rules]
        return "\n".join(lines)


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
    return LayerReport(
        layer.name,
        dict(layer.calls),
        dict(layer.fallbacks),
        dict(layer.config_sources),
        layer.saved_ms,
        layer.timed_calls,
        dict(layer.rules),
        {rule: tuple(sorted(steps)) for rule, steps in layer.rule_steps.items()},
    )


def report_of(parts: Iterable[Component]) -> PluginReport:
    """The report of some components."""
    parts = list(parts)
    whole = joined(
        PluginReport(
            tuple(row_of(layer) for layer in part.layers.values()),
            part.left_out(),
            part.lost(),
        )
        for part in parts
    )
    return dataclasses.replace(whole, idle_rules=tuple(_idle_rules(parts)))


def _idle_rules(parts: list[Component]) -> Iterator[str]:
    """Rules of the parts' policy that decided no call of any of them."""
    policies = {id(p): p for part in parts if (p := part.state.options.policy) is not None}
    for policy in policies.values():
        met = {
            number
            for part in parts
            if part.state.options.policy is policy
            for layer in part.layers.values()
            for number in layer.rules
        }
        for number, rule in enumerate(policy.rules, start=1):
            if number not in met:
                steps = f" at steps {rule.steps}" if rule.steps else ""
                yield f"rule {number} ({rule.kernel} on {', '.join(rule.layers)}{steps})"


def joined(reports: Iterable[PluginReport]) -> PluginReport:
    """Several reports as one."""
    rows: list[LayerReport] = []
    skipped: dict[str, str] = {}
    lost: list[str] = []
    idle: list[str] = []
    for one in reports:
        rows += one.rows
        skipped |= one.skipped
        lost += one.lost
        idle += one.idle_rules
    return PluginReport(tuple(rows), skipped, tuple(lost), tuple(idle))


def _ranges(steps: Sequence[int]) -> str:
    """Sorted steps as text.

    Example:
        >>> _ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _how(row: LayerReport) -> str:
    ran = Counter(row.calls)
    parts = [f"{label} x{n}" for label, n in ran.items()]
    if row.config_sources:
        parts.append("config " + ", ".join(f"{s} x{n}" for s, n in row.config_sources.items()))
    for number, count in sorted(row.rules.items()):
        steps = _ranges(row.rule_steps.get(number, ()))
        parts.append(f"rule {number} x{count}" + (f" at steps {steps}" if steps else ""))
    if row.timed_calls:
        parts.append(f"saved {row.saved_ms:.1f} ms")
    parts += [f"host x{n}: {reason}" for reason, n in row.fallbacks.items()]
    return "; ".join(parts) or "-"
