"""One alternative for each group, so that their values are most and their weights fit.

The multiple-choice knapsack (Sinha and Zoltners, 1979): weights are rounded to a fine grid and it
is solved exactly there, rounded up so that what is chosen surely fits, and rounded down where that
fits too; the linear relaxation says how much the rounding can have cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

GRID = 20_000
PER_GROUP = 200
MOST = 100_000
"""Steps of the grid, fewest of them for each group, and most of all."""


Alternative = tuple[float, float]
"""What choosing it brings, and what it weighs."""

Sums = tuple[tuple[int, ...], float, float]
"""A number of an alternative per group, the sum of their values, and of their weights."""


def solve(
    groups: Sequence[Sequence[Alternative]], capacity: float, *, grid: int | None = None
) -> tuple[tuple[int, ...], float] | None:
    """Choose one alternative in each group; `None` if the lightest ones together do not fit.

    Args:
        groups: alternatives of each group, weights of 0 or more.
        capacity: what the weights may come to.
        grid: steps of the grid, by default enough to lose at most half a percent of the capacity.

    Returns:
        The number of the alternative in each group, and the value that no choice can surpass.

    Example:
        >>> light, heavy = (0.0, 0.0), (5.0, 2.0)
        >>> solve([(light, heavy), (light, heavy)], 3.0)
        ((1, 0), 7.5)
    """
    base = [min(weight for _, weight in group) for group in groups]
    room = capacity - math.fsum(base)
    if room < -1e-9 * max(1.0, abs(capacity)):
        return None
    room = max(0.0, room)
    steps = grid or min(MOST, max(GRID, PER_GROUP * len(groups)))
    size = steps if room > 0 else 0
    sums = [
        sum_of(groups, _dynamic(groups, base, room, size, rounded))
        for rounded in (math.ceil, math.floor)
    ]
    # Rounded down, weights may come to more than there is room for; rounded up they never do.
    fitting = [one for one in sums[1:] if one[2] <= capacity]
    picks, value, _ = max((sums[0], *fitting), key=lambda one: one[1])
    return picks, max(value, _relaxed(groups, base, room))


def sum_of(groups: Sequence[Sequence[Alternative]], picks: tuple[int, ...]) -> Sums:
    """Sum values and weights of what was picked."""
    chosen = [group[pick] for group, pick in zip(groups, picks, strict=True)]
    return picks, math.fsum(value for value, _ in chosen), math.fsum(w for _, w in chosen)


def _dynamic(
    groups: Sequence[Sequence[Alternative]],
    base: Sequence[float],
    room: float,
    size: int,
    rounded: Callable[[float], int],
) -> tuple[int, ...]:
    """The best choice where each weight above its group's lightest is rounded to the grid."""
    best = torch.zeros(size + 1, dtype=torch.float64)
    table = []
    for group, lightest in zip(groups, base, strict=True):
        rows = []
        for value, weight in group:
            steps = _steps(weight - lightest, room, size, rounded)
            row = torch.full_like(best, -math.inf)
            if steps <= size:
                row[steps:] = best[: size + 1 - steps] + value
            rows.append(row)
        best, picked = torch.stack(rows).max(dim=0)
        table.append(picked.to(torch.int16))
    place, picks = size, []
    for group, lightest, picked in zip(
        reversed(groups), reversed(base), reversed(table), strict=True
    ):
        pick = int(picked[place])
        picks.append(pick)
        place -= _steps(group[pick][1] - lightest, room, size, rounded)
    return tuple(reversed(picks))


def _steps(weight: float, room: float, size: int, rounded: Callable[[float], int]) -> int:
    """Grid steps that a weight takes; more than there are where it does not fit."""
    if weight <= 0:
        return 0
    if weight > room:
        return size + 1
    return rounded(weight / room * size * (1 - 1e-12))


def _relaxed(groups: Sequence[Sequence[Alternative]], base: Sequence[float], room: float) -> float:
    """The value if alternatives could be chosen in part: steps along hulls, the steepest first."""
    value, steps = 0.0, []
    for group, lightest in zip(groups, base, strict=True):
        hull = _hull(group)
        assert hull[0][1] == lightest
        value += hull[0][0]
        steps += [(_slope(a, b), b[1] - a[1]) for a, b in itertools.pairwise(hull)]
    for slope, weight in sorted(steps, reverse=True):
        part = min(weight, room)
        value += slope * part
        room -= part
        if room <= 0:
            break
    return value


def _hull(group: Sequence[Alternative]) -> list[Alternative]:
    """The upper left hull of a group, from its best lightest alternative to its most valued."""
    hull: list[Alternative] = []
    for one in sorted(group, key=lambda a: (a[1], -a[0])):
        if hull and one[0] <= hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(a: Alternative, b: Alternative) -> float:
    return (b[0] - a[0]) / (b[1] - a[1])
