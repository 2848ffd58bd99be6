"""How a proof looks on a terminal: time and quality by way of running, and the errors by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sage_plugin.bench.clips.record import ClipRow, Proof
from sage_plugin.bench.clips.summary import DECADES, bars, largest_error, verdict, worst_step
from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.cli.bench_table import STAMP_STYLES, digits

Column = tuple[str, Callable[[ClipRow], str]]

QUALITY: tuple[Column, ...] = (
    ("PSNR dB", lambda row: f"{row.quality.mean_psnr_db:.2f}"),
    ("min", lambda row: f"{row.quality.min_psnr_db:.2f}"),
    ("SSIM", lambda row: f"{row.quality.mean_ssim:.5f}"),
    ("min", lambda row: f"{row.quality.min_ssim:.5f}"),
    ("on a kernel", lambda row: f"{row.kernel_calls} of {row.attention_calls}"),
)


def render(proof: Proof, *, width: int) -> RenderableType:
    """The tables and the sentences below them.

    In a narrow terminal the quality stands below the times.

    Args:
        proof: the proof.
        width: characters of a line.
    """
    times = _times(proof)
    whole = _filled(proof, [*times, *QUALITY])
    grids: list[RenderableType] = [whole]
    if Console(width=1000).measure(whole).maximum > width:
        grids = [_filled(proof, QUALITY)]
        if times:
            grids = [_filled(proof, times), Text(""), *grids]
    return Group(*grids, *_captions(proof), Text(""), _curves(proof), Text(verdict(proof)))


def _times(proof: Proof) -> list[Column]:
    """Real times where there are some, and foreseen ones where there are some."""
    columns: list[Column] = []
    if any(row.time is not None for row in proof.rows):
        columns += [("ms a step", _step), ("±", _spread), ("saved ms", lambda r: _ms(r.saved_ms))]
    if any(row.foreseen_ms is not None for row in proof.rows):
        columns += [
            ("foreseen saved", lambda row: _ms(row.foreseen_saved_ms)),
            ("attention ms", lambda row: _ms(row.foreseen_ms)),
            ("error", lambda row: _error(row.foreseen_error)),
        ]
    return columns


def _filled(proof: Proof, columns: Sequence[Column]) -> Table:
    grid = _grid()
    grid.add_column("way", no_wrap=True)
    for name, _ in columns:
        grid.add_column(name, justify="right", no_wrap=True)
    for row in proof.rows:
        grid.add_row(row.name, *(cell(row) for _, cell in columns))
    return grid


def _grid() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)


def _step(row: ClipRow) -> str:
    return "-" if row.time is None else digits(row.time.step_ms)


def _spread(row: ClipRow) -> str:
    if row.time is None:
        return "-"
    return f"{50 * (row.time.step_high_ms - row.time.step_low_ms) / row.time.step_ms:.1f}%"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _captions(proof: Proof) -> list[Text]:
    lines = ["PSNR and SSIM: each frame against the host's clip, mean and worst frame"]
    if proof.stamp:
        timed = proof.rows[0].time
        runs = 0 if timed is None else timed.runs
        lines[0] = (
            f"times: mean step of whole runs, median of {runs} rounds, and saved in a run over "
            f"{proof.rows[0].name}; {lines[0]}"
        )
    if any(row.foreseen_ms is not None for row in proof.rows):
        lines.append(
            "foreseen: saved in a run, and time and mean error of all its attention calls, by the "
            "policy's search"
        )
    found = [Text(text, style="dim") for text in lines]
    if proof.stamp:
        ratio = "" if proof.aa_ratio is None else f" (A/A {proof.aa_ratio:.3f})"
        found.append(Text(f"timing: {proof.stamp}{ratio}", style=STAMP_STYLES[proof.stamp]))
    if any(row.note for row in proof.rows):
        found.append(Text(f"{EMULATION_NOTE}; only the quality says something", style="yellow"))
    return [*found, *(Text(note, style="yellow") for note in proof.notes)]


def _curves(proof: Proof) -> Table:
    """The errors of the latents over the steps, a row of bars each."""
    largest = largest_error(proof)
    grid = _grid()
    grid.add_column("latents' error", no_wrap=True)
    grid.add_column(f"by step, {DECADES} decades", no_wrap=True)
    for name in ("first", "last", "most in step"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in proof.rows:
        curve = row.step_error
        if not curve:
            continue
        worst = worst_step(curve)
        ends = (_small(curve[0]), _small(curve[-1]), "-" if worst is None else str(worst))
        grid.add_row(row.name, bars(curve, largest), *ends)
    return grid


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)
