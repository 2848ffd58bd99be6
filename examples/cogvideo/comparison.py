"""What a comparison of kernels came to: the table, and the files."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clip_sheet
import step_timing
from text_table import text_table

from sage_plugin.bench.clips import plot, report, summary
from sage_plugin.bench.clips.draw import Frames
from sage_plugin.bench.clips.record import ClipRow, Proof
from sage_plugin.bench.clips.run_config import POLICY
from sage_plugin.errors import OutputError
from sage_plugin.files import write_atomically

REFERENCE = "unpatched"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One clip on several kernels, and by a policy.

    Attributes:
        proof: quality of each clip and error of its latents by step; the times of whole runs where
            a policy was drawn with.
        clips: frames by name, the unpatched clip first.
        steps: times of a denoising step of the kernels.
        fps: frames per second of the clips.
    """

    proof: Proof
    clips: dict[str, Frames]
    steps: step_timing.StepTimes
    fps: int

    @property
    def drawn(self) -> tuple[ClipRow, ...]:
        """All but the unpatched clip."""
        return self.proof.rows[1:]

    def text(self) -> str:
        """A table, one row a kernel."""
        titles = ("kernel", "PSNR mean", "min", "SSIM mean", "min", "on a kernel")
        rows = [
            (*titles, "time of a step", "unpatched / this"),
            (REFERENCE, *("-",) * 5, *step_timing.time_cells(self.steps.rows[0])),
        ]
        times = {row.name: step_timing.time_cells(row) for row in self.steps.rows}
        for one in self.drawn:
            cells = (
                one.name,
                f"{one.quality.mean_psnr_db:.2f} dB",
                f"{one.quality.min_psnr_db:.2f}",
                f"{one.quality.mean_ssim:.5f}",
                f"{one.quality.min_ssim:.5f}",
                f"{one.kernel_calls} of {one.attention_calls}",
            )
            rows.append((*cells, *times.get(one.name, ("-", "-"))))
        return (
            f"{text_table(rows)}\n"
            "PSNR and SSIM of each frame against the unpatched clip; a step is one forward of the "
            f"denoiser (timing: {self.steps.stamp})\n\n{self._curves()}"
        )

    def _curves(self) -> str:
        """The error of the latents over the steps; with a policy, whole runs and its verdict."""
        largest = summary.largest_error(self.proof)
        titles = ("latents", "error by step", "last")
        rows = [titles, *((one.name, *_curve_cells(one, largest)) for one in self.drawn)]
        lines = [
            text_table(rows),
            "relative L2 distance of the latents from the unpatched run's at the end of each step, "
            f"{summary.DECADES} decades",
        ]
        if self.proof.of(POLICY) is not None:
            lines += ["", self._runs(), *self.proof.notes, summary.verdict(self.proof)]
        return "\n".join(lines)

    def _runs(self) -> str:
        """Real against foreseen, of whole runs."""
        titles = ("whole runs", "ms a step", "saved ms", "foreseen saved", "attention ms", "error")
        return text_table([titles, *(_run_cells(row) for row in self.proof.rows)])

    def write(self, folder: Path, facts: dict[str, Any]) -> str:
        """Write sheet.png, side_by_side.gif, frames.csv and metrics.json; of a policy, more.

        Of a policy there are plane.png, if matplotlib is there, and result.json, too.

        Args:
            folder: an existing folder.
            facts: what the comparison was made with.

        Returns:
            Empty, or why a plot is missing.

        Raises:
            OutputError: a file cannot be written.
        """
        differing = clip_sheet.with_differences(self.clips, REFERENCE)
        body = {
            "schema_version": 1,
            "quality": {one.name: _summary(one) for one in self.drawn},
            "steps": self.steps.to_json(),
            **facts,
        }
        text = json.dumps(body, indent=1, allow_nan=False) + "\n"
        try:
            clip_sheet.save_sheet(differing, folder / "sheet.png")
            clip_sheet.save_film(self.clips, folder / "side_by_side.gif", self.fps)
            self._write_frames(folder / "frames.csv")
            (folder / "metrics.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error
        if self.proof.of(POLICY) is None:
            return ""
        write_atomically(folder / "result.json", report.json_text(self.proof, facts))
        return plot.save(self.proof, folder / "plane.png")

    def _write_frames(self, path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(("kernel", "frame", "psnr_db", "ssim"))
            for one in self.drawn:
                pairs = zip(one.quality.psnr_db, one.quality.ssim, strict=True)
                lines.writerows((one.name, frame, *pair) for frame, pair in enumerate(pairs))


def _summary(one: ClipRow) -> dict[str, Any]:
    return {
        "mean_psnr_db": _finite(one.quality.mean_psnr_db),
        "min_psnr_db": _finite(one.quality.min_psnr_db),
        "mean_ssim": one.quality.mean_ssim,
        "min_ssim": one.quality.min_ssim,
        "kernel_calls": one.kernel_calls,
        "attention_calls": one.attention_calls,
        "step_error": [_finite(value) for value in one.step_error],
    }


def _curve_cells(one: ClipRow, largest: float) -> tuple[str, str]:
    if not one.step_error:
        return "not told by the pipeline", "-"
    return summary.bars(one.step_error, largest), f"{one.step_error[-1]:.1e}"


def _run_cells(row: ClipRow) -> tuple[str, ...]:
    step = step_timing.NO_SPEED if row.time is None else f"{row.time.step_ms:.1f}"
    numbers = (row.saved_ms, row.foreseen_saved_ms, row.foreseen_ms)
    error = "-" if row.foreseen_error is None else f"{row.foreseen_error:.5f}"
    return row.name, step, *("-" if x is None else f"{x:.1f}" for x in numbers), error


def _finite(value: float) -> float | str:
    """JSON has no infinity: equal clips say so."""
    return value if math.isfinite(value) else str(value)
