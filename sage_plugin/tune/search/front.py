"""The Pareto front of time and error of a study: what each loss of exactness would buy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin.measure import figure
from sage_plugin.schema import AnyLaunch, JsonRecord, Trial
from sage_plugin.tune.search.search import Search, error_of, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class FrontPoint(JsonRecord):
    """A config than which no other is both faster and more exact.

    Attributes:
        config: the launch config.
        ratio: time over that of the default, in the screen.
        error: centred relative L1 of the worst input.
        allowed: whether it is exact enough to win.
    """

    config: AnyLaunch
    ratio: float
    error: float
    allowed: bool


def front(search: Search, trials: Mapping[AnyLaunch, Trial]) -> tuple[FrontPoint, ...]:
    """List the front, the fastest first."""
    allowed = {trial.config for trial in search.allowed(trials)}
    found: list[FrontPoint] = []
    valid = [(t, e) for t in trials.values() if t.status == "ok" and (e := error_of(t)) is not None]
    for trial, error in sorted(valid, key=lambda pair: (ratio(pair[0]), pair[1])):
        if not found or error < found[-1].error:
            found.append(FrontPoint(trial.config, ratio(trial), error, trial.config in allowed))
    return tuple(found)


def save(
    points: Mapping[str, tuple[FrontPoint, ...]],
    chosen: Mapping[str, AnyLaunch],
    path: Path,
) -> str:
    """Plot the fronts by the names of their studies; return why not if matplotlib is missing."""

    def draw(canvas: Figure) -> None:
        axes = canvas.add_subplot()
        for name, own in points.items():
            (line,) = axes.plot(
                [p.ratio for p in own], [p.error for p in own], marker="o", markersize=3, label=name
            )
            best = [p for p in own if p.config == chosen.get(name)]
            axes.plot(
                [p.ratio for p in best], [p.error for p in best], "*", markersize=13,
                color=line.get_color(),
            )  # fmt: skip
        axes.set_xlabel("time over that of the default config")
        axes.set_ylabel("error (centred, relative L1)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)

    return figure.save(draw, path)
