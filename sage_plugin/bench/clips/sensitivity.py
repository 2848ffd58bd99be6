"""Sensitivity of a clip to each layer and step range: one at a time runs on a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sage_plugin.bench.clips.draw import Frames, Subject
from sage_plugin.bench.clips.run_config import RunConfig
from sage_plugin.errors import DeviceError
from sage_plugin.plugin.policy.rules import HOST, Policy, Rule
from sage_plugin.plugin.policy.rules import SCHEMA_VERSION as POLICY_VERSION
from sage_plugin.plugin.policy.step_range import equal_bands


def measure_sensitivity(
    subject: Subject,
    kernel: str,
    *,
    step_ranges: int,
    report_progress: Callable[[str], None] = lambda words: None,
) -> list[tuple[str, str, float]]:
    """Draw one clip per layer and step range with that part alone on a kernel.

    Args:
        subject: what is drawn.
        kernel: the kernel, or `kernel:variant`.
        step_ranges: ranges of denoising steps, at most one per step.
        report_progress: called with a few words before each clip.

    Returns:
        Layer, step range and root mean square difference of each clip.

    Raises:
        UsageError: a number of ranges that is not allowed.
        UnknownKernelError: no such kernel.
        DeviceError: a clip holds NaN or Inf, or no clip differs: nothing ran on the kernel.
    """
    steps = 0

    def count(_: object) -> None:
        nonlocal steps
        steps += 1

    with subject.patched(RunConfig(HOST)) as handle:
        layers = list(handle.layers)
        report_progress("drawing the baseline")
        baseline = subject.draw(count)
    names = equal_bands(step_ranges, steps)
    found = []
    for layer in layers:
        for number, steps_text in enumerate(names, start=1):
            report_progress(f"drawing with {layer} on {kernel}, steps {number} of {len(names)}")
            rule = Rule(kernel, layers=(layer,), steps=steps_text)
            part = RunConfig(layer, policy=Policy(POLICY_VERSION, (rule,)))
            with subject.patched(part):
                found.append(
                    (layer, steps_text, _rmse(subject.draw(lambda _: None), baseline, layer))
                )
    if not any(rmse for _, _, rmse in found):
        raise DeviceError(
            f"no clip differs from the baseline: no call ran on {kernel}, or all were too short"
        )
    return found


def _rmse(frames: Frames, baseline: Frames, layer: str) -> float:
    value = math.sqrt(np.mean(np.square(frames.astype(np.float64) - baseline.astype(np.float64))))
    if not math.isfinite(value):
        raise DeviceError(f"the clip drawn with {layer} on a kernel holds NaN or Inf")
    return value
