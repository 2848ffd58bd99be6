"""The plot of a search: milliseconds of attention per run against the error, and the choice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin.measure import figure
from sage_plugin.tune.policy.search import PolicySearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(found: PolicySearchResult, path: Path) -> str:
    """Save the plot as a PNG; return why there is none if matplotlib is missing.

    Raises:
        OutputError: it cannot be written.
    """
    return figure.save(lambda canvas: _draw(canvas, found), path, width=8.0, height=5.0)


def _draw(canvas: Figure, found: PolicySearchResult) -> None:
    axes = canvas.add_subplot()
    front = found.front
    axes.plot(
        [one.ms for one in front],
        [one.plain_error for one in front],
        marker="o",
        markersize=3,
        color="tab:blue",
        label="best choices, layer by layer",
    )
    for run in found.prediction.runs[:-1]:
        axes.plot(run.ms, run.error, "s", color="tab:gray", markersize=5)
        axes.annotate(f" {run.name}", (run.ms, run.error), fontsize=8, va="bottom", rotation=20)
    chosen = found.assignment
    axes.plot(
        chosen.ms, chosen.plain_error, "*", color="tab:red", markersize=14, label="the policy"
    )
    axes.set_xlabel(f"attention of a run in ms, on {found.device}")
    axes.set_ylabel("mean error of an attention call (centred, relative L1)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
