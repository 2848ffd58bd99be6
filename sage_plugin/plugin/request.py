"""Which kernel a call is meant for: the patch's, or that of its policy's first rule that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.kernels.attention.dispatch import parse_kernel
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.context import LayerContext
from sage_plugin.plugin.policy.rules import ATTENTION, HOST, Policy, Rule
from sage_plugin.plugin.steps.tracker import Step

NO_RULE = FallbackReason(Fallback.POLICY_WITHOUT_RULE)
NO_TOTAL = FallbackReason(Fallback.POLICY_WITHOUT_STEPS)


class Choice(NamedTuple):
    """What a call is meant for.

    Attributes:
        kernel: kernel name, or `"auto"`.
        variant: variant name, or `"auto"`.
        launch: fields of the launch config that are changed.
        rule: number of the policy's rule, from 1; 0 where none chose.
        step: the denoising step, `None` where none is counted.
        reason: why it is meant for the host, `None` where it is not.
    """

    kernel: str
    variant: str
    launch: Mapping[str, Any]
    rule: int = 0
    step: int | None = None
    reason: FallbackReason | None = None


def choice_of(layer: LayerContext, call: AttentionCall) -> Choice:
    """What a call of a layer is meant for; eager mode only where there is a policy."""
    options = layer.state.options
    if options.policy is None:
        return Choice(options.kernel, options.variant, {})
    return _by_policy(layer, options.policy, call)


def _by_policy(layer: LayerContext, policy: Policy, call: AttentionCall) -> Choice:
    tracker, module = layer.state.tracker, layer.state.forwards.model
    place = None if tracker is None or module is None else tracker.now(module, layer)
    step = place if isinstance(place, Step) else None
    index = None if step is None else step.index
    seq = 2 if call.layout == "bhsd" else 1
    lengths = (call.q.shape[seq], call.k.shape[seq]) if call.q.dim() == 4 else (0, 0)
    for number, rule in enumerate(policy.rules, start=1):
        if rule.op != ATTENTION or not (rule.names(layer.name) and rule.fits(*lengths)):
            continue
        if rule.steps:
            if step is None or (step.total is None and rule.band.needs_total):
                reason = FallbackReason(place) if isinstance(place, Fallback) else NO_TOTAL
                return Choice(HOST, "auto", {}, step=index, reason=reason)
            if not rule.band.contains(step.index, step.total):
                continue
        return _of_rule(number, rule, index)
    return Choice(HOST, "auto", {}, step=index, reason=NO_RULE)


def _of_rule(number: int, rule: Rule, step: int | None) -> Choice:
    if rule.kernel == HOST:
        return Choice(HOST, "auto", {}, number, step, FallbackReason(Fallback.POLICY, number))
    kernel, variant = ("auto", "auto") if rule.kernel == "auto" else parse_kernel(rule.kernel)
    return Choice(kernel, variant, rule.launch, number, step)
