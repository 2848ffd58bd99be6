"""What a comparison of kernels came to: the table, and the files."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clip_sheet
import numpy as np
import step_timing
from clip_quality import Quality
from text_table import text_table

from sage_plugin.errors import OutputError

REFERENCE = "unpatched"


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one kernel drew.

    Attributes:
        frames: its clip, (F, H, W, C) in [0, 1].
        quality: distance of the clip from the reference's.
        kernel_calls: attention calls that ran on a kernel.
        attention_calls: all attention calls.
    """

    frames: np.ndarray[Any, Any]
    quality: Quality
    kernel_calls: int
    attention_calls: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One clip on several kernels.

    Attributes:
        reference: the clip of the host's attention, unpatched.
        drawn: the others by kernel.
        steps: times of a denoising step.
        fps: frames per second of the clips.
    """

    reference: np.ndarray[Any, Any]
    drawn: dict[str, Drawn]
    steps: step_timing.StepTimes
    fps: int

    def text(self) -> str:
        """A table, one row a kernel."""
        titles = ("kernel", "PSNR mean", "min", "SSIM mean", "min", "on a kernel")
        rows = [
            (*titles, "time of a step", "unpatched / this"),
            (REFERENCE, *("-",) * 5, *step_timing.time_cells(self.steps.rows[0])),
        ]
        for row in self.steps.rows[1:]:
            one = self.drawn[row.name]
            cells = (
                row.name,
                f"{one.quality.mean_psnr_db:.2f} dB",
                f"{min(one.quality.psnr_db):.2f}",
                f"{one.quality.mean_ssim:.5f}",
                f"{min(one.quality.ssim):.5f}",
                f"{one.kernel_calls} of {one.attention_calls}",
            )
            rows.append((*cells, *step_timing.time_cells(row)))
        return (
            f"{text_table(rows)}\n"
            "PSNR and SSIM of each frame against the unpatched clip; a step is one forward of the "
            f"denoiser (timing: {self.steps.stamp})"
        )

    def write(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write sheet.png, side_by_side.gif, frames.csv and metrics.json.

        Args:
            folder: an existing folder.
            facts: what the comparison was made with.

        Raises:
            OutputError: a file cannot be written.
        """
        clips = {REFERENCE: self.reference} | {k: one.frames for k, one in self.drawn.items()}
        differing = clip_sheet.with_differences(clips, REFERENCE)
        body = {
            "schema_version": 1,
            "quality": {kernel: _summary(one) for kernel, one in self.drawn.items()},
            "steps": self.steps.to_json(),
            **facts,
        }
        text = json.dumps(body, indent=1, allow_nan=False) + "\n"
        try:
            clip_sheet.save_sheet(differing, folder / "sheet.png")
            clip_sheet.save_film(clips, folder / "side_by_side.gif", self.fps)
            self._write_frames(folder / "frames.csv")
            (folder / "metrics.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error

    def _write_frames(self, path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(("kernel", "frame", "psnr_db", "ssim"))
            for kernel, one in self.drawn.items():
                pairs = zip(one.quality.psnr_db, one.quality.ssim, strict=True)
                lines.writerows((kernel, frame, *pair) for frame, pair in enumerate(pairs))


def _summary(one: Drawn) -> dict[str, float | str]:
    return {
        "mean_psnr_db": _finite(one.quality.mean_psnr_db),
        "min_psnr_db": _finite(min(one.quality.psnr_db)),
        "mean_ssim": one.quality.mean_ssim,
        "min_ssim": min(one.quality.ssim),
        "kernel_calls": one.kernel_calls,
        "attention_calls": one.attention_calls,
    }


def _finite(value: float) -> float | str:
    """JSON has no infinity: equal clips say so."""
    return "inf" if math.isinf(value) else value
