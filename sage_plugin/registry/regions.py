"""What a call loses by the config of another length or batch, and what an entry may serve so."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from sage_plugin.registry.distance import alike
from sage_plugin.registry.entries import Span, lengths, ranges, with_ranges
from sage_plugin.schema import AnyEntry, AnyKey, AnyLaunch

LIMIT = 0.01
"""Loss that a region may have, as a share of the best time."""
MOST_COMPARED = 12
"""Boxes of which every subset is looked at for the fewest that do; of more, the widest are taken
first."""

Point = tuple[int, ...]
"""Where configs were timed: the length of a call, and of attention batch times heads."""
Box = tuple[Span, ...]
"""Lowest and highest of each number of a point."""
Times = Mapping[Point, Mapping[AnyLaunch, float]]
"""Milliseconds by point and config; each config of a row was timed at that point."""
Name = TypeVar("Name")


def regret(times: Times, at: Point, config: AnyLaunch) -> float | None:
    """Return what a point loses by a config; `None` where it was not timed there."""
    row = times[at]
    return row[config] / min(row.values()) - 1 if config in row else None


def region(times: Times, at: Point, config: AnyLaunch, limit: float = LIMIT) -> tuple[Box, float]:
    """Return the largest box around a point, without a gap, that loses within a limit by a config.

    Returns:
        The box, and the most that one of its points loses; the point itself counts as it is.
    """
    losses = {point: regret(times, point, config) for point in times}
    sound = {p for p, loss in losses.items() if p == at or (loss is not None and loss <= limit)}
    axes = [sorted(set(values)) for values in zip(*times, strict=True)]
    best: list[Point] = [at]
    for box in itertools.product(*map(_spans, axes, at)):
        inside = [
            [v for v in axis if low <= v <= high]
            for axis, (low, high) in zip(axes, box, strict=True)
        ]
        points = list(itertools.product(*inside))
        if len(points) > len(best) and sound.issuperset(points):
            best = points
    found = tuple((min(values), max(values)) for values in zip(*best, strict=True))
    return found, max(loss for point in best if (loss := losses[point]) is not None)


def priced(
    entries: Iterable[AnyEntry],
    times: Mapping[AnyKey, Mapping[AnyLaunch, float]],
    limit: float = LIMIT,
) -> tuple[AnyEntry, ...]:
    """Give entries the regions that were measured, and the most that a call in them loses.

    Args:
        entries: tuned configs.
        times: milliseconds of configs by the key that they were timed at.
        limit: loss that a region may have.

    Returns:
        The entries in their order; those whose key was not timed beside others as they were. Only
        calls of as many queries as keys are priced.
    """
    groups: defaultdict[object, dict[Point, Mapping[AnyLaunch, float]]] = defaultdict(dict)
    for key, row in times.items():
        if (point := _point(key)) is not None:
            groups[alike(key)][point] = row
    return tuple(_priced(entry, groups.get(alike(entry.key), {}), limit) for entry in entries)


def redundant(entries: Sequence[AnyEntry], limit: float = LIMIT) -> tuple[AnyEntry, ...]:
    """List the entries without which every corner of a priced region still lies in one."""
    groups: defaultdict[object, dict[int, Box]] = defaultdict(dict)
    for number, entry in enumerate(entries):
        point = _point(entry.key)
        if point is not None and entry.regret is not None and entry.regret <= limit:
            spans = ranges(entry)
            own = ((value, value) for value in point[1:])
            others = (spans.get(n, here) for n, here in zip(_others(entry.key), own, strict=True))
            groups[alike(entry.key)][number] = (spans[entry.key.LENGTHS[0]], *others)
    gone: set[int] = set()
    for boxes in groups.values():
        corners = {corner for box in boxes.values() for corner in itertools.product(*box)}
        gone |= boxes.keys() - set(_fewest(boxes, corners))
    return tuple(entry for number, entry in enumerate(entries) if number in gone)


def _spans(axis: Sequence[int], value: int) -> list[Span]:
    """Ranges of the values of an axis that hold one of them."""
    return [(a, b) for a in axis if a <= value for b in axis if b >= value]


def _fewest(boxes: Mapping[Name, Box], points: Collection[Point]) -> tuple[Name, ...]:
    """The fewest boxes that together hold all points, each of which lies in some box."""
    held = {
        name: {p for p in points if all(a <= v <= b for v, (a, b) in zip(p, box, strict=True))}
        for name, box in boxes.items()
    }
    wanted = set(points)
    if len(boxes) <= MOST_COMPARED:
        sets = (s for n in range(1, len(boxes) + 1) for s in itertools.combinations(boxes, n))
        return next(s for s in sets if set().union(*(held[name] for name in s)) >= wanted)
    chosen: list[Name] = []
    while wanted:
        widest = max(boxes, key=lambda name: len(held[name] & wanted))
        chosen.append(widest)
        wanted -= held[widest]
    return tuple(chosen)


def _priced(entry: AnyEntry, times: Times, limit: float) -> AnyEntry:
    at = _point(entry.key)
    if at is None or at not in times:
        return entry
    box, loss = region(times, at, entry.config, limit)
    spans: dict[str, Span] = {}
    for axis, names in enumerate((entry.key.LENGTHS, *((name,) for name in _others(entry.key)))):
        if any(_differ_in(axis, at, other) for other in times):
            spans |= dict.fromkeys(names, box[axis])
    return with_ranges(entry, spans, regret=float(f"{loss:.3g}")) if spans else entry


def _differ_in(axis: int, first: Point, second: Point) -> bool:
    """Whether two points differ in one number, and in no other."""
    return [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b] == [axis]


def _point(key: AnyKey) -> Point | None:
    """Where a call was timed; `None` where it has two lengths."""
    found = set(lengths(key).values())
    return (*found, *(getattr(key, name) for name in _others(key))) if len(found) == 1 else None


def _others(key: AnyKey) -> tuple[str, ...]:
    """The numbers of a key that are no lengths."""
    return tuple(name for name in key.NUMBERS if name not in key.LENGTHS)
