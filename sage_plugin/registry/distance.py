"""How near two call keys are, and in what they differ first."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from sage_plugin.registry.entries import ranges
from sage_plugin.schema import AnyEntry, AnyKey

UNREAD = "layout"
"""A discrete field that no config depends on: kernels read strides."""


def log_distance(first: AnyKey, second: AnyKey) -> float:
    """Distance of two keys' numbers in log space, so that 1k is as far from 2k as 2k from 4k."""
    pairs = zip(first.numbers(), second.numbers(), strict=True)
    return math.hypot(*(math.log(a / b) for a, b in pairs))


REACH = 2
"""An entry serves numbers up to this factor beyond what was measured around it."""

SHARED_DTYPES = ("float16", "bfloat16")
"""Dtypes that share entries: kernels move as many bytes for each."""


class Nearness(IntEnum):
    """How well an entry fits a call, best first."""

    EXACT = 0
    """The very key."""
    MEASURED = 1
    """Numbers inside the ranges between its measured neighbors."""
    REACHED = 2
    """Numbers within `REACH` of those ranges; no loss was measured there."""


def alike(key: AnyKey) -> tuple[object, ...]:
    """The fields that must be equal for a config to be shared.

    The layout is none of them, and both 16-bit dtypes are one.
    """
    return tuple(
        "16 bit" if name == "dtype" and key.dtype in SHARED_DTYPES else getattr(key, name)
        for name in _discrete(key)
    )


def _discrete(key: AnyKey) -> tuple[str, ...]:
    kind: Any = type(key)
    return _discrete_of(kind)


@functools.cache
def _discrete_of(kind: type[AnyKey]) -> tuple[str, ...]:
    names = (field.name for field in dataclasses.fields(kind))
    return tuple(name for name in names if name not in (*kind.NUMBERS, UNREAD))


def nearness(entry: AnyEntry, key: AnyKey) -> Nearness | None:
    """How well an entry fits a call, `None` where it may not serve it."""
    if entry.key == key:
        return Nearness.EXACT
    if alike(entry.key) != alike(key) or range_problem(entry, key) is not None:
        return None
    spans = ranges(entry)
    inside = all(low <= getattr(key, name) <= high for name, (low, high) in spans.items())
    return Nearness.MEASURED if inside else Nearness.REACHED


def range_problem(entry: AnyEntry, key: AnyKey) -> str | None:
    """Which number of a key lies beyond an entry's reach, or `None`."""
    for name, (low, high) in ranges(entry).items():
        number = getattr(key, name)
        if not low <= number * REACH or not number <= high * REACH:
            return f"{name} {number} is over {REACH} times from its measured range {low}..{high}"
    return None


def first_difference(entry: AnyEntry, key: AnyKey) -> str | None:
    """Name the first field in which an entry differs so that it cannot serve a key, or `None`."""
    for name in _discrete(key):
        there, here = getattr(entry.key, name), getattr(key, name)
        shared = name == "dtype" and {there, here} <= set(SHARED_DTYPES)
        if there != here and not shared:
            return f"{name} is {there} there, {here} here"
    return range_problem(entry, key)


def closest(entries: Iterable[AnyEntry], key: AnyKey) -> AnyEntry | None:
    """The entry with the fewest differing discrete fields, then the nearest numbers; or `None`."""

    def rank(entry: AnyEntry) -> tuple[int, float, tuple[int, ...]]:
        pairs = zip(alike(entry.key), alike(key), strict=True)
        return sum(a != b for a, b in pairs), log_distance(entry.key, key), entry.key.numbers()

    return min(entries, key=rank, default=None)
