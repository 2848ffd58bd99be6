"""What each option would do in each cell: its error there, and the milliseconds of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sage_plugin.plugin.policy.rules import HOST
from sage_plugin.schema import CallShape
from sage_plugin.tune.policy.grid import Grid, Place, PolicyCell, kind
from sage_plugin.tune.policy.option import Option


@dataclass(frozen=True, slots=True)
class CellErrors:
    """What the captures of a cell showed.

    Attributes:
        files: the captures that were judged.
        errors: by option, the error of the worst of them, or why the option is out.
    """

    files: tuple[str, ...]
    errors: Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One option in one cell.

    Attributes:
        label: the option, `sdpa` for the host's attention.
        error: centred error of the worst head of the worst capture, of one call.
        ms: of all calls of the cell in one run.
        captures: files of the captures behind the error.
    """

    label: str
    error: float
    ms: float
    captures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CellEstimates:
    """A cell and what may run there, the host's attention first."""

    place: Place
    cell: PolicyCell
    estimates: tuple[Estimate, ...]

    def of(self, label: str) -> Estimate:
        """What an option does here; the host's attention where it may not run."""
        return next((e for e in self.estimates if e.label == label), self.estimates[0])


def worst_of(values: Sequence[float | str]) -> float | str:
    """The greatest of some errors, or the first reason among them."""
    reasons = [value for value in values if isinstance(value, str)]
    return reasons[0] if reasons else max(value for value in values if isinstance(value, float))


def estimates_of(
    grid: Grid,
    errors: Mapping[Place, CellErrors],
    times: Mapping[CallShape, Mapping[str, float]],
    options: Sequence[Option],
) -> tuple[CellEstimates, ...]:
    """Estimates for every cell whose calls were timed on the host's attention.

    A cell without a capture takes the worst of its neighbours: the nearest captured steps of its
    layer, and the nearest captured layers of its kind in its steps.

    Args:
        grid: the cells.
        errors: of the captured cells.
        times: milliseconds of a call by shape and label.
        options: what may be chosen.
    """
    found = []
    for place, cell in grid.cells.items():
        host_ms = _milliseconds(cell, times, HOST)
        if host_ms is None:
            continue
        near = [place] if place in errors else list(neighbors(grid, errors, place))
        files = tuple(file for p in near for file in errors[p].files)
        estimates = [Estimate(HOST, 0.0, host_ms)]
        for option in options if near else ():
            ms = _milliseconds(cell, times, option.label)
            error = worst_of([errors[p].errors.get(option.label, "not measured") for p in near])
            if ms is not None and isinstance(error, float):
                estimates.append(Estimate(option.label, error, ms, files))
        found.append(CellEstimates(place, cell, tuple(estimates)))
    return tuple(found)


def neighbors(grid: Grid, captured: Mapping[Place, object], place: Place) -> Iterator[Place]:
    """Captured cells that stand in for one without a capture; none where no layer is of its kind.

    Example:
        >>> places = [(i, b) for i in range(4) for b in range(3)]
        >>> cells = {(i, b): PolicyCell(f"blocks.{i}.attn", "", ()) for i, b in places}
        >>> grid = Grid(tuple(f"blocks.{i}.attn" for i in range(4)), ("", "", ""), cells, 3, 12)
        >>> list(neighbors(grid, {(0, 0): 1, (3, 1): 1, (1, 2): 1}, (1, 1)))
        [(1, 2), (3, 1)]
    """
    layer, band = place
    alike = [p for p in captured if kind(grid.layers[p[0]]) == kind(grid.layers[layer])]
    own = sorted(p for p in alike if p[0] == layer)
    across = sorted(p for p in alike if p[1] == band)
    sides = (
        [p for p in own if p[1] < band][-1:],
        [p for p in own if p[1] > band][:1],
        [p for p in across if p[0] < layer][-1:],
        [p for p in across if p[0] > layer][:1],
    )
    near = [p for side in sides for p in side]
    yield from near or alike


def _milliseconds(
    cell: PolicyCell, times: Mapping[CallShape, Mapping[str, float]], label: str
) -> float | None:
    """Of all calls of a cell in one run; `None` where a shape was not timed."""
    total = 0.0
    for shape, calls in cell.calls:
        ms = times.get(shape, {}).get(label)
        if ms is None:
            return None
        total += calls * ms
    return total
