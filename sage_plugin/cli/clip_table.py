"""How compared clips look on a terminal: time and quality by run, and the errors by step."""

from __future__ import annotations

import textwrap

from rich.console import Group, RenderableType
from rich.text import Text

from sage_plugin.bench.clips.record import ClipComparison, ClipRow
from sage_plugin.bench.clips.summary import DECADES, bars, largest_error, verdict, worst_step
from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.cli.tables import STAMP_STYLES, Column, digits, fitted, optional

DRIFT = "latents' error by step"
QUALITY: tuple[Column[ClipRow], ...] = (
    ("PSNR dB", lambda row: f"{row.quality.mean_psnr_db:.2f}"),
    ("min", lambda row: f"{row.quality.min_psnr_db:.2f}"),
    ("SSIM", lambda row: f"{row.quality.summary()['mean_ssim']:.5f}"),
    ("min", lambda row: f"{row.quality.summary()['min_ssim']:.5f}"),
    ("on a kernel", lambda row: f"{row.kernel_calls} of {row.attention_calls}"),
)
TIMES: tuple[Column[ClipRow], ...] = (
    ("ms per step", lambda row: "-" if row.time is None else digits(row.time.step_ms)),
    ("±", lambda row: _spread(row)),
    ("saved ms", lambda row: optional(row.saved_ms, ".1f")),
)
PREDICTED: tuple[Column[ClipRow], ...] = (
    ("predicted saved", lambda row: optional(row.predicted_saved_ms, ".1f")),
    ("attention ms", lambda row: optional(row.predicted_ms, ".1f")),
    ("error", lambda row: optional(row.predicted_error, ".5f")),
)


def render(comparison: ClipComparison, *, width: int) -> RenderableType:
    """Render the tables, the quality below the times if they do not fit, and the sentences."""
    rows = comparison.rows
    times = TIMES if any(row.time is not None for row in rows) else ()
    predicted = PREDICTED if any(row.predicted_ms is not None for row in rows) else ()
    tables = fitted(rows, ("run", lambda row: row.name), [(*times, *predicted), QUALITY], width)
    words = _captions(comparison, predicted=bool(predicted))
    drift = _drift(comparison, width)
    return Group(*tables, *words, Text(""), *drift, Text(verdict(comparison)))


def _spread(row: ClipRow) -> str:
    if row.time is None:
        return "-"
    return f"{50 * (row.time.step_high_ms - row.time.step_low_ms) / row.time.step_ms:.1f}%"


def _captions(comparison: ClipComparison, *, predicted: bool) -> list[Text]:
    lines = ["PSNR and SSIM: each frame against the baseline's clip, mean and worst frame"]
    if comparison.stamp:
        timed = comparison.rows[0].time
        runs = 0 if timed is None else timed.runs
        lines[0] = (
            f"times: mean step of whole runs, median of {runs} rounds, and saved in a run over "
            f"{comparison.rows[0].name}; {lines[0]}"
        )
    if predicted:
        lines.append(
            "predicted: saved in a run, and time and mean error of all its attention calls, by the "
            "policy's search"
        )
    found = [Text(text, style="dim") for text in lines]
    if comparison.stamp:
        ratio = "" if comparison.aa_ratio is None else f" (A/A {comparison.aa_ratio:.3f})"
        style = STAMP_STYLES[comparison.stamp]
        found.append(Text(f"timing: {comparison.stamp}{ratio}", style=style))
    if any(row.note for row in comparison.rows):
        found.append(Text(f"{EMULATION_NOTE}; only the quality says something", style="yellow"))
    found.append(
        Text(f"bars: latents' error on a logarithmic scale of {DECADES} decades", style="dim")
    )
    return [*found, *(Text(note, style="yellow") for note in comparison.notes)]


def _drift(comparison: ClipComparison, width: int) -> list[RenderableType]:
    """The errors of the latents over the steps, a row of bars each."""
    rows = [row for row in comparison.rows if row.step_error]
    largest = largest_error(comparison)
    room = max(10, width - 1 - max((len(row.name) for row in rows), default=0))

    def curve(row: ClipRow) -> str:
        return "\n".join(textwrap.wrap(bars(row.step_error, largest), room))

    columns: list[Column[ClipRow]] = [
        (DRIFT, curve),
        ("first", lambda row: _small(row.step_error[0])),
        ("last", lambda row: _small(row.step_error[-1])),
        ("most in step", lambda row: optional(worst_step(row.step_error), "d")),
    ]
    return fitted(rows, ("run", lambda row: row.name), [columns], width)


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"
