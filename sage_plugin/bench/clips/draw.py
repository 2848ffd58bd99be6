"""Drawing a clip once: frames, distance from the baseline's run, calls, time of each step."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sage_plugin.bench.clips.latent_drift import LatentDrift
from sage_plugin.bench.clips.run_config import RunConfig
from sage_plugin.bench.clips.stopwatch import Stopwatch
from sage_plugin.errors import DeviceError
from sage_plugin.plugin.patch import MIN_SEQ, PatchHandle
from sage_plugin.plugin.report import PluginReport

Frames = np.ndarray[Any, Any]
"""A clip, (F, H, W, C) float32 in [0, 1]."""

OnStep = Callable[[torch.Tensor], None]
"""Takes the latents at the end of each denoising step."""

Draw = Callable[[OnStep], Frames]
"""Draws the same clip each time that it is called, from the same noise."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is drawn.

    Attributes:
        pipe: a pipeline, not patched.
        draw: draws one clip with it, the same each time.
        device: where it runs.
        min_seq: as `patch` takes it.
        config_dir: as `patch` takes it.
    """

    pipe: object
    draw: Draw
    device: torch.device
    min_seq: int = MIN_SEQ
    config_dir: str | os.PathLike[str] | None = None

    def patched(self, config: RunConfig) -> contextlib.AbstractContextManager[PatchHandle]:
        """Patch the pipeline for a run; errors are those of `patch`."""
        return config.patched(self.pipe, min_seq=self.min_seq, config_dir=self.config_dir)

    def denoisers(self, configs: Sequence[RunConfig]) -> list[nn.Module]:
        """Return the modules that are patched; every config is tried on them, nothing is drawn."""
        found: list[nn.Module] = []
        for config in configs:
            with self.patched(config) as handle:
                found = list(handle.components.values())
        return found

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One clip.

    Attributes:
        frames: the clip.
        step_error: relative L2 distance of the latents from the baseline's, a number per step.
        steps_ms: time of each denoising step but the first, which may compile.
        report: what the patched layers did.
    """

    frames: Frames
    step_error: tuple[float, ...]
    steps_ms: tuple[float, ...]
    report: PluginReport

    @property
    def ran(self) -> dict[str, int]:
        """Calls by what they ran on: `kernel:variant`, or why they fell back."""
        ran: Counter[str] = Counter()
        for row in self.report.rows:
            ran.update(row.calls)
            ran.update({f"host: {reason}": count for reason, count in row.fallbacks.items()})
        return dict(ran)

    @property
    def emulated(self) -> bool:
        """Whether a kernel was emulated, so that its time says nothing."""
        labels = [label for row in self.report.linears for label in row.calls]
        return any(label.endswith(":emulation") for label in (*self.ran, *labels))


def draw_once(
    subject: Subject,
    config: RunConfig,
    drift: LatentDrift,
    on_step: Callable[[], object] = lambda: None,
) -> Drawn:
    """Patch the pipeline and draw a clip; the latents of the first one, the baseline, are kept."""
    first = not len(drift)
    errors: list[float] = []
    watch = Stopwatch(subject.wait)

    def end_step(latents: torch.Tensor) -> None:
        watch.mark_step()
        if first:
            drift.keep(latents)
        errors.append(drift.distance(len(errors), latents))
        on_step()

    with subject.patched(config) as handle:
        watch.start()
        try:
            frames = subject.draw(end_step)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"drawing with {config.name} does not fit into the memory of the device; draw a "
                "smaller clip"
            ) from error
        if not np.isfinite(frames).all():
            raise DeviceError(f"the clip drawn with {config.name} holds NaN or Inf")
        steps_ms = watch.steps_ms[1:] if errors else ()
        return Drawn(frames, tuple(errors), steps_ms, handle.report())
