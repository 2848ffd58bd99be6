"""How near two call keys are, and in what they differ first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from sage_plugin.schema import CallKey, RegistryEntry

NUMBER_FIELDS = ("seq_q", "seq_k", "batch_heads")


def log_distance(first: CallKey, second: CallKey) -> float:
    """Return the distance of two keys' numbers in log space: 1k is as far from 2k as 2k from 4k."""
    pairs = zip(first.numbers(), second.numbers(), strict=True)
    return math.hypot(*(math.log(a / b) for a, b in pairs))


def covers(entry: RegistryEntry, key: CallKey) -> bool:
    """Tell whether an entry may serve a key: equal discrete fields, lengths in its range."""
    return entry.key.discrete() == key.discrete() and range_problem(entry, key) is None


def range_problem(entry: RegistryEntry, key: CallKey) -> str | None:
    """Name the length of a key that lies outside an entry's measured range, or `None`."""
    ranges = (("seq_q", key.seq_q, entry.seq_q_range), ("seq_k", key.seq_k, entry.seq_k_range))
    for name, length, (low, high) in ranges:
        if not low <= length <= high:
            return f"{name} {length} is outside its measured range {low}..{high}"
    return None


def first_difference(entry: RegistryEntry, key: CallKey) -> str | None:
    """Name the first field for which an entry cannot serve a key, or `None`."""
    for field in dataclasses.fields(CallKey):
        there, here = getattr(entry.key, field.name), getattr(key, field.name)
        if field.name not in NUMBER_FIELDS and there != here:
            return f"{field.name} is {there} there, {here} here"
    return range_problem(entry, key)


def closest(entries: Iterable[RegistryEntry], key: CallKey) -> RegistryEntry | None:
    """Return the entry with the fewest differing discrete fields, then the nearest numbers."""

    def rank(entry: RegistryEntry) -> tuple[int, float, tuple[int, ...]]:
        pairs = zip(entry.key.discrete(), key.discrete(), strict=True)
        return sum(a != b for a, b in pairs), log_distance(entry.key, key), entry.key.numbers()

    return min(entries, key=rank, default=None)
