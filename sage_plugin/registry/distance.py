"""How near two call keys are, and in what they differ first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from enum import IntEnum

from sage_plugin.schema import CallKey, RegistryEntry

NUMBER_FIELDS = ("seq_q", "seq_k", "batch_heads")
FREE_FIELDS = (*NUMBER_FIELDS, "layout")


def log_distance(first: CallKey, second: CallKey) -> float:
    """Distance of two keys' numbers in log space, so that 1k is as far from 2k as 2k from 4k."""
    pairs = zip(first.numbers(), second.numbers(), strict=True)
    return math.hypot(*(math.log(a / b) for a, b in pairs))


REACH = 2
"""An entry serves lengths up to this factor beyond what was measured around it."""

SHARED_DTYPES = ("float16", "bfloat16")
"""Dtypes that share entries: kernels move as many bytes for each."""


class Nearness(IntEnum):
    """How well an entry fits a call, best first."""

    EXACT = 0
    """The very key."""
    MEASURED = 1
    """Lengths inside the range between its measured neighbors."""
    REACHED = 2
    """Lengths within `REACH` of that range; no loss was measured there."""


def alike(key: CallKey) -> tuple[object, ...]:
    """The fields that must be equal for a config to be shared.

    Kernels read strides, so that the layout is none of them, and both 16-bit dtypes are one.
    """
    dtype = "16 bit" if key.dtype in SHARED_DTYPES else key.dtype
    return (
        key.kernel, key.variant, key.head_dim, key.dv, dtype, key.gqa_ratio, key.causal,
        key.mask_kind,
    )  # fmt: skip


def nearness(entry: RegistryEntry, key: CallKey) -> Nearness | None:
    """How well an entry fits a call, `None` where it may not serve it."""
    if entry.key == key:
        return Nearness.EXACT
    if alike(entry.key) != alike(key) or range_problem(entry, key) is not None:
        return None
    inside = all(low <= length <= high for _, length, (low, high) in _lengths(entry, key))
    return Nearness.MEASURED if inside else Nearness.REACHED


def range_problem(entry: RegistryEntry, key: CallKey) -> str | None:
    """Which length of a key lies beyond an entry's reach, or `None`."""
    for name, length, (low, high) in _lengths(entry, key):
        if not low <= length * REACH or not length <= high * REACH:
            return f"{name} {length} is over {REACH} times from its measured range {low}..{high}"
    return None


def _lengths(
    entry: RegistryEntry, key: CallKey
) -> tuple[tuple[str, int, tuple[int, ...]], tuple[str, int, tuple[int, ...]]]:
    return ("seq_q", key.seq_q, entry.seq_q_range), ("seq_k", key.seq_k, entry.seq_k_range)


def first_difference(entry: RegistryEntry, key: CallKey) -> str | None:
    """The first field in which an entry differs from a key so that it cannot serve it, or `None`.

    Example:
        "head_dim is 64 there, 128 here", or "seq_q 9000 is over 2 times from its measured range
        1024..4096".
    """
    for field in dataclasses.fields(CallKey):
        there, here = getattr(entry.key, field.name), getattr(key, field.name)
        shared = field.name == "dtype" and {there, here} <= set(SHARED_DTYPES)
        if field.name not in FREE_FIELDS and there != here and not shared:
            return f"{field.name} is {there} there, {here} here"
    return range_problem(entry, key)


def closest(entries: Iterable[RegistryEntry], key: CallKey) -> RegistryEntry | None:
    """The entry with the fewest differing discrete fields, then the nearest numbers; or `None`."""

    def rank(entry: RegistryEntry) -> tuple[int, float, tuple[int, ...]]:
        pairs = zip(alike(entry.key), alike(key), strict=True)
        return sum(a != b for a, b in pairs), log_distance(entry.key, key), entry.key.numbers()

    return min(entries, key=rank, default=None)
