"""What a clip feels of each layer and band of steps: one at a time runs on a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sage_plugin.bench.clips.draw import Frames
from sage_plugin.bench.clips.run_config import Way
from sage_plugin.errors import DeviceError
from sage_plugin.plugin.policy.rules import SCHEMA_VERSION as POLICY_VERSION
from sage_plugin.plugin.policy.rules import Policy, Rule
from sage_plugin.plugin.policy.step_range import equal_bands

if TYPE_CHECKING:
    from sage_plugin.bench.clips.run import Subject


def measure_effects(
    subject: Subject,
    kernel: str,
    *,
    bands: int,
    tell: Callable[[str], None] = lambda words: None,
) -> list[tuple[str, str, float]]:
    """Draw one clip a layer and band with that part alone on a kernel; how far each is off.

    Args:
        subject: what is drawn.
        kernel: the kernel, or `kernel:variant`.
        bands: bands of denoising steps, at most one a step.
        tell: told a few words before each clip.

    Returns:
        Layer, band and root mean square difference of each, as `sage policy search` reads them.

    Raises:
        UsageError: a number of bands that is not allowed.
        UnknownKernelError: no such kernel.
        DeviceError: a clip holds NaN or Inf, or no clip differs: nothing ran on the kernel.
    """
    steps = 0

    def count(_: object) -> None:
        nonlocal steps
        steps += 1

    with subject.patched(Way("sdpa")) as handle:
        layers = list(handle.layers)
        tell("drawing with the host's attention")
        host = subject.draw(count)
    names = equal_bands(bands, steps)
    found = []
    for layer in layers:
        for number, band in enumerate(names, start=1):
            tell(f"drawing with {layer} on {kernel}, band {number} of {len(names)}")
            rule = Rule(kernel, layers=(layer,), steps=band)
            part = Way(layer, policy=Policy(POLICY_VERSION, (rule,)))
            with subject.patched(part):
                found.append((layer, band, _rmse(subject.draw(lambda _: None), host, layer)))
    if not any(rmse for _, _, rmse in found):
        raise DeviceError(
            f"no clip differs from the host's: no call ran on {kernel}, or all were too short"
        )
    return found


def _rmse(frames: Frames, host: Frames, layer: str) -> float:
    value = math.sqrt(np.mean(np.square(frames.astype(np.float64) - host.astype(np.float64))))
    if not math.isfinite(value):
        raise DeviceError(f"the clip drawn with {layer} on a kernel holds NaN or Inf")
    return value
