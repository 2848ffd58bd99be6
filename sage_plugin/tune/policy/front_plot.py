"""The plot of a search: milliseconds of attention per run against the error, and the choice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_plugin.measure import figure
from sage_plugin.tune.policy.search import PolicySearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(
    found: PolicySearchResult,
    path: Path,
    *,
    max_error: float | None = None,
    max_ms: float | None = None,
) -> str:
    """Save the plot as a PNG, with the limit that was asked for as a line.

    Returns:
        Why there is none if matplotlib is missing, else an empty text.

    Raises:
        OutputError: it cannot be written.
    """

    def draw(canvas: Figure) -> None:
        axes = canvas.add_subplot()
        if max_error is not None:
            axes.axhline(max_error, color="tab:red", linestyle=":", label="--max-error")
        if max_ms is not None:
            axes.axvline(max_ms, color="tab:red", linestyle=":", label="--max-ms")
        _draw(axes, found)

    return figure.save(draw, path, width=8.0, height=5.0)


def _draw(axes: Any, found: PolicySearchResult) -> None:  # noqa: ANN401
    front = found.front
    axes.plot(
        [one.ms for one in front],
        [one.plain_error for one in front],
        marker="o",
        markersize=3,
        color="tab:blue",
        label="best choices, layer by layer",
    )
    singles = found.prediction.runs[:-1]
    axes.plot(
        [run.ms for run in singles],
        [run.error for run in singles],
        "s",
        color="tab:gray",
        markersize=5,
        label="one kernel everywhere",
    )
    for run in singles:
        axes.annotate(f" {run.name}", (run.ms, run.error), fontsize=8, va="bottom", rotation=20)
    chosen = found.assignment
    axes.plot(
        chosen.ms, chosen.plain_error, "*", color="tab:red", markersize=14, label="the policy"
    )
    axes.set_xlabel(f"{found.problem.words} of a run in ms, on {found.device}")
    axes.set_ylabel("mean error of a call (centred, relative L1)")
    axes.margins(0.12)  # room for names
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
