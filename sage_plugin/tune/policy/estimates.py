"""What each option would do in each cell: its error there, and the milliseconds of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sage_plugin.plugin.context import layer_form
from sage_plugin.plugin.policy.rules import BASELINES
from sage_plugin.schema import AnyShape
from sage_plugin.tune.policy.grid import Estimate, Grid, Place, PolicyCell
from sage_plugin.tune.policy.option import Option

Judged = tuple[tuple[str, ...], Mapping[str, float | str]]
"""Captures of a cell, and by option the error of the worst of them, or why the option is out."""


def worst_of(values: Sequence[float | str]) -> float | str:
    """Return the greatest of some errors, or the first reason among them."""
    reasons = [value for value in values if isinstance(value, str)]
    return reasons[0] if reasons else max(value for value in values if isinstance(value, float))


def estimated(
    grid: Grid,
    judged: Mapping[Place, Judged],
    times: Mapping[AnyShape, Mapping[str, float]],
    options: Sequence[Option],
) -> tuple[PolicyCell, ...]:
    """Estimate every cell whose calls were timed on the baseline, which comes first in each.

    A cell without a capture takes the worst of its neighbors: the nearest captured steps of its
    layer, and the nearest captured layers of its kind in its steps.
    """
    found = []
    baseline = BASELINES[grid.op]
    for place, cell in grid.cells.items():
        baseline_ms = _milliseconds(cell, times, baseline)
        if baseline_ms is None:
            continue
        near = [place] if place in judged else list(neighbors(grid, judged, place))
        files = tuple(file for p in near for file in judged[p][0])
        estimates = [Estimate(baseline, 0.0, baseline_ms)]
        for option in options if near else ():
            ms = _milliseconds(cell, times, option.label)
            error = worst_of([judged[p][1].get(option.label, "not measured") for p in near])
            if ms is not None and isinstance(error, float):
                estimates.append(Estimate(option.label, error, ms, files))
        found.append(replace(cell, estimates=tuple(estimates)))
    return tuple(found)


def neighbors(grid: Grid, captured: Mapping[Place, object], place: Place) -> Iterator[Place]:
    """Yield captured cells that stand in for one without a capture; none if no layer is alike.

    Example:
        >>> places = [(i, r) for i in range(4) for r in range(3)]
        >>> cells = {p: PolicyCell(p, f"blocks.{p[0]}.attn", "", ()) for p in places}
        >>> grid = Grid(tuple(f"blocks.{i}.attn" for i in range(4)), ("", "", ""), cells, 3, 12)
        >>> list(neighbors(grid, {(0, 0): 1, (3, 1): 1, (1, 2): 1}, (1, 1)))
        [(1, 2), (3, 1)]
    """
    layer, steps = place
    alike = [p for p in captured if layer_form(grid.layers[p[0]]) == layer_form(grid.layers[layer])]
    own = sorted(p for p in alike if p[0] == layer)
    across = sorted(p for p in alike if p[1] == steps)
    sides = (
        [p for p in own if p[1] < steps][-1:],
        [p for p in own if p[1] > steps][:1],
        [p for p in across if p[0] < layer][-1:],
        [p for p in across if p[0] > layer][:1],
    )
    near = [p for side in sides for p in side]
    yield from near or alike


def _milliseconds(
    cell: PolicyCell, times: Mapping[AnyShape, Mapping[str, float]], label: str
) -> float | None:
    """Of all calls of a cell in one run; `None` if a shape was not timed."""
    total = 0.0
    for shape, calls in cell.calls:
        ms = times.get(shape, {}).get(label)
        if ms is None:
            return None
        total += calls * ms
    return total
