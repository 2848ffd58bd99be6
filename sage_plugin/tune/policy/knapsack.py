"""One alternative for each group, so that their values are most and their weights fit.

The multiple-choice knapsack (Sinha and Zoltners, 1979): weights are rounded to a fine grid and it
is solved exactly there, rounded up so that what is chosen surely fits, and rounded down where that
fits too; the linear relaxation says how much the rounding can have cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GRID = 20_000
PER_GROUP = 200
MOST = 100_000
"""Steps of the grid, fewest of them for each group, and most of all."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """What choosing it brings and costs."""

    value: float
    weight: float


@dataclass(frozen=True, slots=True)
class Solution:
    """One alternative for each group.

    Attributes:
        picks: number of the alternative chosen in each group.
        value: sum of their values.
        weight: sum of their weights, at most the capacity.
        bound: no choice that fits has a greater value than this.
    """

    picks: tuple[int, ...]
    value: float
    weight: float
    bound: float


def solve(
    groups: Sequence[Sequence[Alternative]], capacity: float, *, grid: int | None = None
) -> Solution | None:
    """Choose one alternative in each group; `None` where the lightest ones together do not fit.

    Args:
        groups: alternatives of each group, weights of 0 or more.
        capacity: what the weights may come to.
        grid: steps of the grid, by default enough to lose at most half a percent of the capacity.

    Example:
        >>> light, heavy = Alternative(0.0, 0.0), Alternative(5.0, 2.0)
        >>> solve([(light, heavy), (light, heavy)], 3.0).picks
        (1, 0)
    """
    base = [min(alternative.weight for alternative in group) for group in groups]
    room = capacity - math.fsum(base)
    if room < -1e-9 * max(1.0, abs(capacity)):
        return None
    room = max(0.0, room)
    steps = grid or min(MOST, max(GRID, PER_GROUP * len(groups)))
    size = steps if room > 0 else 0
    sums = [
        _sums(groups, _dynamic(groups, base, room, size, rounded))
        for rounded in (math.ceil, math.floor)
    ]
    # Rounded down, weights may come to more than there is room for; rounded up they never do.
    fitting = [one for one in sums[1:] if one[2] <= capacity]
    picks, value, weight = max((sums[0], *fitting), key=lambda one: one[1])
    return Solution(picks, value, weight, max(value, _relaxed(groups, base, room)))


def _sums(
    groups: Sequence[Sequence[Alternative]], picks: tuple[int, ...]
) -> tuple[tuple[int, ...], float, float]:
    """The picks with the sums of their values and weights."""
    chosen = [group[pick] for group, pick in zip(groups, picks, strict=True)]
    value = math.fsum(alternative.value for alternative in chosen)
    return picks, value, math.fsum(alternative.weight for alternative in chosen)


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
        for alternative in group:
            steps = _steps(alternative.weight - lightest, room, size, rounded)
            row = torch.full_like(best, -math.inf)
            if steps <= size:
                row[steps:] = best[: size + 1 - steps] + alternative.value
            rows.append(row)
        best, picked = torch.stack(rows).max(dim=0)
        table.append(picked.to(torch.int16))
    place, picks = size, []
    for group, lightest, picked in zip(
        reversed(groups), reversed(base), reversed(table), strict=True
    ):
        pick = int(picked[place])
        picks.append(pick)
        place -= _steps(group[pick].weight - lightest, room, size, rounded)
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
        hull = _hull(group, lightest)
        value += hull[0].value
        steps += [
            ((b.value - a.value) / (b.weight - a.weight), b.weight - a.weight)
            for a, b in itertools.pairwise(hull)
        ]
    for slope, weight in sorted(steps, reverse=True):
        part = min(weight, room)
        value += slope * part
        room -= part
        if room <= 0:
            break
    return value


def _hull(group: Sequence[Alternative], lightest: float) -> list[Alternative]:
    """The upper left hull of a group, from its best lightest alternative to its most valued."""
    hull: list[Alternative] = []
    for one in sorted(group, key=lambda a: (a.weight, -a.value)):
        if hull and one.value <= hull[-1].value:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], one):
            hull.pop()
        hull.append(one)
    assert hull[0].weight == lightest
    return hull


def _slope(a: Alternative, b: Alternative) -> float:
    return (b.value - a.value) / (b.weight - a.weight)
