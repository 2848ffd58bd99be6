"""How a clip is drawn, and drawing it once: frames, distance from the host's run, calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sage_plugin.bench.clips.latent_drift import Curve
from sage_plugin.bench.clips.run_config import Way
from sage_plugin.errors import DeviceError
from sage_plugin.plugin.report import PluginReport

Frames = np.ndarray[Any, Any]
"""A clip, (F, H, W, C) float32 in [0, 1]."""

OnStep = Callable[[torch.Tensor], None]
"""Takes the latents at the end of each denoising step."""

Draw = Callable[[OnStep], Frames]
"""Draws the same clip each time that it is called, from the same noise."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One clip.

    Attributes:
        frames: the clip.
        step_error: relative L2 distance of the latents from the host's, a number a step.
        report: what the patched layers did.
    """

    frames: Frames
    step_error: tuple[float, ...]
    report: PluginReport

    @property
    def ran(self) -> dict[str, int]:
        """Calls by what they ran on: `kernel:variant`, or why on the host's attention."""
        ran: Counter[str] = Counter()
        for row in self.report.rows:
            ran.update(row.calls)
            ran.update({f"host: {reason}": count for reason, count in row.fallbacks.items()})
        return dict(ran)

    @property
    def emulated(self) -> bool:
        """Whether a kernel was emulated, so that its time says nothing."""
        return any(label.endswith(":emulation") for label in self.ran)


def draw_once(draw: Draw, way: Way, curve: Curve, report: Callable[[], PluginReport]) -> Drawn:
    """Draw a clip with a pipeline that is patched; the first one is the host's, and kept.

    Args:
        draw: draws it.
        way: the way that the pipeline is patched for.
        curve: empty for the host's run; filled by it.
        report: tells what the layers did.

    Raises:
        DeviceError: it does not fit into memory, or holds NaN or Inf.
    """
    first = not len(curve)
    errors: list[float] = []

    def on_step(latents: torch.Tensor) -> None:
        if first:
            curve.keep(latents)
        errors.append(curve.distance(len(errors), latents))

    try:
        frames = draw(on_step)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"drawing with {way.name} does not fit into the memory of the device; draw a smaller "
            "clip"
        ) from error
    if not np.isfinite(frames).all():
        raise DeviceError(f"the clip drawn with {way.name} holds NaN or Inf")
    return Drawn(frames, tuple(errors), report())
