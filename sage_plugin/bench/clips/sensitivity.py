"""Sensitivity of a clip to each layer and step range: one at a time runs on a kernel.

A linear is quantized for all steps, since its weight is one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from sage_plugin.bench.clips.draw import Frames, Subject
from sage_plugin.bench.clips.run_config import RunConfig
from sage_plugin.capture.ops import OPS
from sage_plugin.errors import ConfigError, DeviceError
from sage_plugin.plugin.component import component_of
from sage_plugin.plugin.patch import PatchHandle
from sage_plugin.plugin.policy.rules import HOST, Policy, Rule
from sage_plugin.plugin.policy.rules import SCHEMA_VERSION as POLICY_VERSION
from sage_plugin.plugin.policy.step_range import equal_bands
from sage_plugin.schema import ATTENTION, LINEAR, LINEAR_KERNELS


def measure_sensitivity(
    subject: Subject,
    kernels: Sequence[str],
    *,
    step_ranges: int,
    globs: Sequence[str] = ("*",),
    report_progress: Callable[[str], None] = lambda words: None,
) -> list[tuple[str, str, float, str]]:
    """Draw one clip per layer and step range with that part alone on a kernel.

    Args:
        subject: what is drawn.
        kernels: kernels of attention, also as `kernel:variant`, or of linears.
        step_ranges: ranges of denoising steps, at most one per step.
        globs: of the layers, those that one of these matches.
        report_progress: called with a few words before each clip.

    Returns:
        Layer, step range, root mean square difference and kernel of each clip.

    Raises:
        UsageError: a number of ranges that is not allowed.
        UnknownKernelError: no such kernel.
        ConfigError: no layer matches.
        DeviceError: a clip holds NaN or Inf, or no clip differs: nothing ran on the kernel.
    """
    steps = 0

    def count(_: object) -> None:
        nonlocal steps
        steps += 1

    with subject.patched(RunConfig(HOST)) as handle:
        rules = [
            Rule(kernel, layers=(layer,), op=op)
            for kernel in kernels
            for op in (_op_of(kernel),)
            for layer in _layers(handle, op)
            if any(fnmatchcase(layer, glob) for glob in globs)
        ]
        if not rules:
            raise ConfigError(f"layers {', '.join(globs)!r} match nothing that can be quantized")
        report_progress("drawing the baseline")
        baseline = subject.draw(count)
    ranges = equal_bands(step_ranges, steps)
    parts = [
        dataclasses.replace(rule, steps=steps_text)
        for rule in rules
        for steps_text in (("",) if rule.op == LINEAR else ranges)
    ]
    found = []
    for number, rule in enumerate(parts, start=1):
        layer = rule.layers[0]
        report_progress(f"drawing with {layer} on {rule.kernel} ({number} of {len(parts)})")
        with subject.patched(RunConfig(layer, policy=Policy(POLICY_VERSION, (rule,)))):
            rmse = _rmse(subject.draw(lambda _: None), baseline, layer)
        found.append((layer, rule.steps, rmse, rule.kernel))
    for kernel in kernels:
        if not any(rmse for _, _, rmse, own in found if own == kernel):
            raise DeviceError(
                f"no clip differs from the baseline: no call ran on {kernel}, or all were too short"
            )
    return found


def _op_of(kernel: str) -> str:
    """Op family of a kernel, which its name tells."""
    return LINEAR if kernel.partition(":")[0] in LINEAR_KERNELS else ATTENTION


def _layers(handle: PatchHandle, op: str) -> list[str]:
    """Names of the layers of a patched pipeline that rules may name."""
    if op == ATTENTION:
        return list(handle.layers)
    parts = [part for model in handle.components.values() if (part := component_of(model))]
    return [name for part in parts for name in OPS[op].layers(part)]


def _rmse(frames: Frames, baseline: Frames, layer: str) -> float:
    value = math.sqrt(np.mean(np.square(frames.astype(np.float64) - baseline.astype(np.float64))))
    if not math.isfinite(value):
        raise DeviceError(f"the clip drawn with {layer} on a kernel holds NaN or Inf")
    return value
