"""What each layer will run on before it runs: kernel, launch config, its source, expected gain."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from sage_plugin.errors import UsageError
from sage_plugin.kernels import call_words
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.contract import HOST, Decision, ResolvedConfig
from sage_plugin.plugin import report_text
from sage_plugin.plugin.component import Component
from sage_plugin.plugin.context import LayerContext, PatchOptions, layer_form
from sage_plugin.plugin.plan.model_calls import CROSS, SELF, calls_of, config_of
from sage_plugin.plugin.policy.rules import ATTENTION, Rule
from sage_plugin.registry.config_words import config_text
from sage_plugin.schema import CallShape, DeviceFacts

NO_RULE = "no rule of the policy takes it"


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """What a call of one layer will run on.

    Attributes:
        layer: module path with the component in front.
        shape: the call, `None` where it is not known before a run.
        kernel: `kernel:variant`, empty where the library's own attention takes the call.
        reason: why it does, or why nothing is known.
        found: the launch config and where it comes from, `None` without a kernel.
        steps: the denoising steps that this is for, empty for all.
    """

    layer: str
    shape: CallShape | None
    kernel: str = ""
    reason: str = ""
    found: ResolvedConfig | None = None
    steps: str = ""

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds that the call saves by the times of its tuning, `None` where unknown."""
        return None if self.found is None else self.found.saved_ms


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The calls of one forward.

    Attributes:
        rows: the planned calls in the model's order; a layer has several where a policy goes by
            steps.
        device: name of the device that they are planned for.
    """

    rows: tuple[PlannedCall, ...]
    device: str

    def saved_ms(self) -> float:
        """Milliseconds that a forward saves in calls that were timed, if each has one row."""
        return sum(row.saved_ms or 0.0 for row in self.rows)

    def text(self) -> str:
        """The plan for a terminal of 80 columns, equal layers together."""
        ran = sum(bool(row.kernel) for row in self.rows)
        timed = sum(row.saved_ms is not None for row in self.rows)
        lines = [f"plan for {self.device}: {ran} of {len(self.rows)} calls go to a kernel"]
        if timed and not any(row.steps for row in self.rows):
            saved = f"about {self.saved_ms():.1f} ms saved per forward"
            lines.append(f"{saved}, by the tuning of {timed} of them")
        groups: defaultdict[PlannedCall, list[str]] = defaultdict(list)
        every: defaultdict[str, list[str]] = defaultdict(list)
        for row in self.rows:
            groups[dataclasses.replace(row, layer=layer_form(row.layer))].append(row.layer)
            every[layer_form(row.layer)].append(row.layer)
        for row, layers in groups.items():
            name = report_text.shared_name(layers, every[row.layer])
            count = f", {len(layers)} layers" if len(layers) > 1 else ""
            lines += [
                *report_text.wrapped(f"{name}{count}: {_shape_words(row.shape)}", ""),
                *report_text.wrapped(_words(row)),
            ]
        return "\n".join(lines)


def plan_of(parts: Iterable[Component]) -> RunPlan:
    """Plan one forward of patched components by the configurations of their models."""
    rows: list[PlannedCall] = []
    device = ""
    for part in parts:
        if part.module is None:
            continue
        facts = _facts_of(part.module)
        device = device or facts.name
        shapes = _shapes_of(part.module)
        for layer in part.layers.values():
            shape = shapes if isinstance(shapes, str) else shapes.get(_kind(layer), shapes[SELF])
            if isinstance(shape, str):
                rows.append(PlannedCall(layer.name, None, reason=shape))
            else:
                rows += planned(layer.name, shape, part.state.options, facts)
    return RunPlan(tuple(rows), device)


def planned(
    layer: str, shape: CallShape, options: PatchOptions, facts: DeviceFacts
) -> Iterator[PlannedCall]:
    """Plan a call of a layer: once, or once for each rule of a policy that may take it."""
    if options.policy is None:
        yield _planned(layer, shape, options, facts, options.kernel, options.variant)
        return
    for rule in options.policy.rules:
        if rule.op == ATTENTION and rule.names(layer) and rule.fits(shape.seq_q, shape.seq_k):
            yield _by_rule(layer, shape, options, facts, rule)
            if not rule.steps:
                return
    yield PlannedCall(layer, shape, reason=NO_RULE)


def _by_rule(
    layer: str, shape: CallShape, options: PatchOptions, facts: DeviceFacts, rule: Rule
) -> PlannedCall:
    kernel, variant = ("auto", "auto") if rule.kernel == "auto" else ("sdpa", "auto")
    if rule.kernel not in ("auto", HOST):
        kernel, variant = dispatch.parse_kernel(rule.kernel)
    row = _planned(layer, shape, options, facts, kernel, variant)
    if row.found is not None and rule.launch:
        config = row.found.config.replaced(**rule.launch)
        row = dataclasses.replace(row, found=ResolvedConfig(config, "policy", row.found.detail))
    return dataclasses.replace(row, steps=rule.steps or "")


def _planned(
    layer: str, shape: CallShape, options: PatchOptions, facts: DeviceFacts, kernel: str,
    variant: str,
) -> PlannedCall:  # fmt: skip
    decision: Decision = dispatch.decide(
        shape, facts, kernel=kernel, variant=variant, min_seq=options.min_seq
    )
    if decision.reason is not None:
        return PlannedCall(layer, shape, reason=str(decision.reason))
    if decision.variant == HOST:
        return PlannedCall(layer, shape, reason=f"{decision.kernel} is asked for")
    key = dispatch.call_key(shape, decision)
    found = dispatch.find_launch(key, facts, config_dir=options.config_dir)
    return PlannedCall(layer, shape, decision.label, found=found)


def _shapes_of(module: nn.Module) -> dict[str, CallShape] | str:
    """The calls of a model by kind, or why they are not known before a run."""
    try:
        return {call.kind: call.shape for call in calls_of(config_of(module))}
    except UsageError as error:
        return str(error)


def _kind(layer: LayerContext) -> str:
    """Whether a layer attends to the text across, as far as its module tells."""
    crosses = getattr(layer.attention, "is_cross_attention", None)
    if crosses is None:
        crosses = layer.name.rpartition(".")[2] == "attn2"
    return CROSS if crosses else SELF


def _facts_of(module: nn.Module) -> DeviceFacts:
    tensor = next(module.parameters(), torch.empty(0, device="cpu"))
    kind = tensor.device.type
    return dispatch.facts_of("cpu" if kind == "meta" else kind, tensor.device.index)


def _shape_words(shape: CallShape | None) -> str:
    return "shapes not known before a run" if shape is None else call_words.describe(shape)


def _words(row: PlannedCall) -> str:
    steps = f"at steps {row.steps}: " if row.steps else ""
    if row.found is None:
        return f"{steps}the library's own attention: {row.reason}"
    gain = "gain not measured" if row.saved_ms is None else f"saves {row.saved_ms:.2f} ms a call"
    config = config_text(row.found.config)
    return f"{steps}{row.kernel}, {config} ({row.found.mark}, {row.found.detail}), {gain}"
