"""What a call loses by the config of another length, and the lengths that an entry may serve so."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sage_plugin.registry.distance import alike
from sage_plugin.registry.entries import lengths, ranges, with_ranges
from sage_plugin.schema import AnyEntry, AnyKey, AnyLaunch

LIMIT = 0.01
"""Loss that a region may have, as a share of the best time."""

Times = Mapping[int, Mapping[AnyLaunch, float]]
"""Milliseconds by length and config; each config of a row was timed at that length."""


def regret(times: Times, seq: int, config: AnyLaunch) -> float | None:
    """Return what a length loses by a config; `None` where it was not timed there."""
    row = times[seq]
    return row[config] / min(row.values()) - 1 if config in row else None


def region(
    times: Times, at: int, config: AnyLaunch, limit: float = LIMIT
) -> tuple[int, int, float]:
    """Return the lengths around one, without a gap, that lose no more than a limit by a config.

    Returns:
        The lowest, the highest, and the most that one of them loses; itself counts as it is.
    """
    lengths = sorted(times)
    place = lengths.index(at)

    def within(seq: int) -> bool:
        loss = regret(times, seq, config)
        return seq == at or (loss is not None and loss <= limit)

    below = list(itertools.takewhile(within, reversed(lengths[: place + 1])))
    above = list(itertools.takewhile(within, lengths[place:]))
    losses = (regret(times, seq, config) for seq in (*below, *above))
    return below[-1], above[-1], max((loss for loss in losses if loss is not None), default=0.0)


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
        The entries in their order; those whose key was not timed beside other lengths as they were.
        Only calls of as many queries as keys are priced.
    """
    groups: defaultdict[object, dict[int, Mapping[AnyLaunch, float]]] = defaultdict(dict)
    for key, row in times.items():
        if (length := _length(key)) is not None:
            groups[_kind(key)][length] = row
    return tuple(_priced(entry, groups.get(_kind(entry.key), {}), limit) for entry in entries)


def redundant(entries: Sequence[AnyEntry], limit: float = LIMIT) -> tuple[AnyEntry, ...]:
    """List the entries without which every length of a priced region still lies in one."""
    groups: defaultdict[object, list[AnyEntry]] = defaultdict(list)
    for entry in entries:
        if entry.regret is not None and entry.regret <= limit:
            groups[_kind(entry.key)].append(entry)
    found: list[AnyEntry] = []
    for group in groups.values():
        spans = {i: next(iter(ranges(entry).values())) for i, entry in enumerate(group)}
        kept = fewest(spans, sorted({seq for span in spans.values() for seq in span}))
        found += [entry for i, entry in enumerate(group) if i not in kept]
    return tuple(found)


def fewest(spans: Mapping[int, tuple[int, int]], lengths: Sequence[int]) -> tuple[int, ...]:
    """List the fewest spans that together hold all lengths, each of which lies in some span."""
    sets = (s for n in range(1, len(spans) + 1) for s in itertools.combinations(spans, n))
    return next(
        s for s in sets if all(any(spans[i][0] <= seq <= spans[i][1] for i in s) for seq in lengths)
    )


def _priced(entry: AnyEntry, times: Times, limit: float) -> AnyEntry:
    at = _length(entry.key)
    if len(times) < 2 or at is None or at not in times:
        return entry
    low, high, loss = region(times, at, entry.config, limit)
    spans = dict.fromkeys(entry.key.LENGTHS, (low, high))
    return with_ranges(entry, spans, regret=float(f"{loss:.3g}"))


def _length(key: AnyKey) -> int | None:
    """The one length of a call; `None` where it has two."""
    found = set(lengths(key).values())
    return found.pop() if len(found) == 1 else None


def _kind(key: AnyKey) -> object:
    """What calls share whose lengths are priced against each other."""
    others = (name for name in key.NUMBERS if name not in key.LENGTHS)
    return alike(key), *(getattr(key, name) for name in others)
