"""The form of a searched policy on a full-size model: predicted and real milliseconds of a step.

The layers of the model that the policy was searched on are spread over those of the full-size one
by their depth, and each band of denoising steps becomes a policy of its own, since a step is timed
without a scheduler. Predicted is the unpatched step less what its attention calls save when they
are timed alone.

    python benchmarks/policy_geometry.py policy.json --output geometry.json [--model cogvideox-2b]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import step_models
import step_timing
import torch
from accuracy import identity, write
from gpu_options import gpu_parser, on_gpu, positive

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.capture.call import canonical
from sage_plugin.families.attention.replay import AttentionReplay
from sage_plugin.kernels.attention.dispatch import parse_kernel
from sage_plugin.measure.inputs import in_layout
from sage_plugin.measure.timing import TimingLimits, measure
from sage_plugin.plugin.context import CallEvent
from sage_plugin.plugin.policy.rules import SCHEMA_VERSION, Policy, Rule, read
from sage_plugin.tune.policy.option import Option

Facts = dict[str, Any]
HOST = "sdpa"


def source_layers(policy: Policy) -> list[str]:
    """Layers that the policy names, in their order."""
    return sorted({layer for rule in policy.rules for layer in rule.layers})


def per_band(policy: Policy, layers: Sequence[str], steps: int) -> dict[str, Policy]:
    """By the steps that share it, a policy without steps for the layers of the full-size model.

    Args:
        policy: the searched one.
        layers: layers of the full-size model, in its order.
        steps: denoising steps that bands are seen at.
    """
    sources = source_layers(policy)
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    rules: dict[str, Rule] = {}
    for step in range(steps):
        picks = []
        for number, layer in enumerate(layers):
            source = sources[number * len(sources) // len(layers)]
            rule = next(
                (r for r in policy.rules if r.names(source) and r.band.contains(step, steps)), None
            )
            label = HOST if rule is None else f"{rule.kernel} {sorted(rule.launch.items())}"
            if rule is not None:
                rules[label] = rule
            picks.append((layer, label))
        found.setdefault(tuple(picks), []).append(step)
    return {
        ",".join(map(str, at)): Policy(SCHEMA_VERSION, _rules(picks, rules))
        for picks, at in found.items()
    }


def _rules(picks: Sequence[tuple[str, str]], rules: dict[str, Rule]) -> tuple[Rule, ...]:
    by_label: dict[str, list[str]] = {}
    for layer, label in picks:
        by_label.setdefault(label, []).append(layer)
    made = [
        Rule(rules[label].kernel, tuple(names), launch=rules[label].launch)
        for label, names in by_label.items()
        if label != HOST
    ]
    return (*made, Rule(HOST))


def option_of(rule: Rule) -> Option:
    """A rule's kernel and fields as the search names them."""
    kernel, variant = parse_kernel(rule.kernel)
    return Option(kernel, variant, tuple(sorted(rule.launch.items())))


def calls_alone(event: CallEvent, options: Sequence[Option]) -> dict[str, Callable[[], object]]:
    """One attention call of the model alone, on the host's attention and on each option."""
    call = canonical(event)
    if isinstance(call, str):
        raise SystemExit(f"the model's call cannot be replayed: {call}")
    tensors = tuple(in_layout(tensor, call.shape.layout) for tensor in (call.q, call.k, call.v))
    timed = AttentionReplay(tensors, call.mask, call.shape)
    found = {HOST: timed.whole()}
    facts = devices.facts(event.q.device)
    for option in options:
        runnable = option.runnable(call.shape, facts, None)
        if isinstance(runnable, str):
            raise SystemExit(f"{option.label}: {runnable}")
        found[option.label] = timed.whole(*runnable)
    return found


def measured(args: argparse.Namespace) -> Facts:
    """Predicted and real steps of every band."""
    step = step_models.build(args.model, torch.device(args.device), tiny=args.tiny)
    events: list[CallEvent] = []
    min_seq = 0 if args.tiny else 1024
    with sage_plugin.patched(step.model, kernel=HOST, min_seq=min_seq) as handle:
        layers = list(handle.layers)
        handle.listeners.append(events.append)
        _timed(step, {}, 0)()
    bands = per_band(read(args.policy), layers, args.steps)
    rules = [rule for policy in bands.values() for rule in policy.rules[:-1]]
    options = {option.label: option for option in map(option_of, rules)}
    limits = TimingLimits(warmup=2, min_samples=5, max_samples=40, budget_s=args.budget)
    call_ms = _medians(calls_alone(events[0], list(options.values())), args.device, limits)
    ways: dict[str, Facts] = {name: {"policy": policy} for name, policy in bands.items()}
    ways |= {option.kernel: {"kernel": option.kernel} for option in options.values()}
    calls = {"unpatched": _timed(step, {}, min_seq)}
    calls |= {name: _timed(step, options, min_seq) for name, options in ways.items()}
    step_ms = _medians(calls, args.device, limits)
    rows = []
    for name, policy in bands.items():
        used = Counter({option_of(r).label: len(r.layers) for r in policy.rules[:-1]})
        saved = sum(n * (call_ms[HOST] - call_ms[label]) for label, n in used.items())
        rows.append(
            {
                "steps": name,
                "layers": dict(used),
                "predicted_ms": step_ms["unpatched"] - saved,
                "ms": step_ms[name],
            }
        )
    weights = [len(row["steps"].split(",")) / args.steps for row in rows]
    mean = {
        key: sum(w * row[key] for w, row in zip(weights, rows, strict=True))
        for key in ("predicted_ms", "ms")
    }
    return {"call_ms": call_ms, "step_ms": step_ms, "bands": rows, "mean": mean}


def _timed(step: Any, options: Facts, min_seq: int) -> Callable[[], object]:  # noqa: ANN401
    """A step of the model, or of a patched copy that shares its weights."""
    model = step.model
    if options:
        model = step_timing.sharing_copy(model)
        sage_plugin.patch(model, min_seq=min_seq, **options)

    def run() -> None:
        with torch.no_grad():
            model(**step.arguments)

    return run


def _medians(
    calls: dict[str, Callable[[], object]], device: str, limits: TimingLimits
) -> dict[str, float]:
    samples = measure(calls, device=device, limits=limits)
    return {name: sample.timing().median_ms for name, sample in samples.items()}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("policy", type=Path, help="policy file")
    add("--model", choices=list(step_models.MODELS), default="cogvideox-2b")
    add("--steps", type=int, default=50, help="denoising steps")
    add("--budget", type=positive, default=15.0, help="seconds of timing")
    add("--tiny", action="store_true", help="a tiny model, for a CPU")
    args = parser.parse_args(argv)
    return on_gpu(parser, args, "a full-size step takes minutes on a CPU; try --tiny there")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parsed(argv)
    facts = measured(args)
    for row in facts["bands"]:
        print(f"steps {row['steps']}: predicted {row['predicted_ms']:.1f} ms, real {row['ms']:.1f}")
    mean, unpatched = facts["mean"], facts["step_ms"]["unpatched"]
    print(
        f"mean of {args.steps} steps: predicted {mean['predicted_ms']:.1f} ms, real "
        f"{mean['ms']:.1f}, unpatched {unpatched:.1f}; {facts['step_ms']}"
    )
    body = identity(args.device, args.commit)
    write(args.output, body | {"model": args.model, "policy": str(args.policy)} | facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
