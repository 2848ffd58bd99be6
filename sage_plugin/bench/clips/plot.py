"""A comparison as a figure: the plane of time and PSNR, and the error over the steps."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_plugin.bench.clips.pareto import pareto_front
from sage_plugin.bench.clips.record import ClipComparison
from sage_plugin.bench.clips.run_config import POLICY
from sage_plugin.measure import figure as figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_WIDTH = 6.0
"""Inches."""


def save(comparison: ClipComparison, path: Path) -> str:
    """Save the plot; empty, or why there is none.

    Without times there is only the panel of the errors.
    """
    panels = 2 if _has_plane(comparison) else 1
    return figures.save(functools.partial(draw, comparison), path, width=panels * PANEL_WIDTH)


def draw(comparison: ClipComparison, figure: Figure) -> None:
    """Fill a figure."""
    panels = figure.subplots(1, 2 if _has_plane(comparison) else 1, squeeze=False)[0]
    if _has_plane(comparison):
        _plane(comparison, panels[0])
    timed = "" if _has_plane(comparison) else "\n(nothing was timed: no plane of time and PSNR)"
    _curves(comparison, panels[-1], f"Error by denoising step{timed}")


def _has_plane(comparison: ClipComparison) -> bool:
    return bool(pareto_front(comparison.kernel_points))


def _plane(comparison: ClipComparison, axes: Any) -> None:  # noqa: ANN401
    corners = pareto_front(comparison.kernel_points)
    axes.plot([p.ms for p in corners], [p.psnr_db for p in corners], "--", color="grey", zorder=1)
    for row in comparison.rows[1:]:
        point = row.point
        if point is None or not math.isfinite(point.psnr_db):
            continue
        marker = "*" if row.name == POLICY else "o"
        axes.scatter([point.ms], [point.psnr_db], marker=marker, s=160 if marker == "*" else 40)
        axes.annotate(
            row.name, (point.ms, point.psnr_db), xytext=(6, 6), textcoords="offset points"
        )
    baseline = comparison.rows[0]
    if baseline.time is not None:
        axes.axvline(baseline.time.step_ms, color="grey", linewidth=0.8)
        axes.annotate(
            baseline.name, (baseline.time.step_ms, 0.02), xycoords=("data", "axes fraction"),
            xytext=(4, 0), textcoords="offset points",
        )  # fmt: skip
    axes.set_xlabel("ms per denoising step")
    axes.set_ylabel("mean PSNR against the baseline's clip, dB")
    axes.set_title("Time and PSNR")
    axes.margins(0.15)


def _curves(comparison: ClipComparison, axes: Any, title: str) -> None:  # noqa: ANN401
    axes.set_title(title)
    shown = [row for row in comparison.rows if any(x > 0 for x in row.step_error)]
    for row in shown:
        # A logarithm has no place for steps without an error: there the curve has a gap.
        heights = [x if x > 0 else math.nan for x in row.step_error]
        wide = 2.5 if row.name == POLICY else 1.2
        axes.plot(range(len(heights)), heights, marker=".", linewidth=wide, label=row.name)
    if shown:
        axes.set_yscale("log")
        axes.legend()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("denoising step")
    axes.set_ylabel("relative L2 distance of the latents from the baseline's")
