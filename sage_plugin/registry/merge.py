"""The only writer of registry files: add tuned entries to one, by rules, under a lock."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.registry import load, lookup, regions, staleness, store
from sage_plugin.registry.distance import REACH
from sage_plugin.registry.entries import lengths, ranges, with_ranges
from sage_plugin.schema import (
    NO_SPEEDS,
    SCHEMA_VERSION,
    AnyEntry,
    AnyKey,
    AnyLaunch,
    DeviceFacts,
    RegistryFile,
    Toolchain,
)

TRUSTED = ("", "clean")
"""Stamps of times that may take an entry's place; earlier releases had none."""

ALREADY_THERE = "already there"
Prices = Mapping[AnyKey, Mapping[AnyLaunch, float]]
KeyNote = tuple[AnyKey, str]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did with each entry, as pairs of key and sentence."""

    added: tuple[KeyNote, ...] = ()
    replaced: tuple[KeyNote, ...] = ()
    kept: tuple[KeyNote, ...] = ()


def merge(
    path: str | Path,
    entries: Sequence[AnyEntry],
    *,
    family: str,
    facts: DeviceFacts,
    toolchain: Toolchain,
    min_gain: float = 0.0,
) -> MergeReport:
    """Merge entries into a registry file; the whole read-change-write is one critical section.

    An entry is written where the lower bound of its gain beats `min_gain`, or where it confirms the
    baseline. Synthetic evidence never replaces an entry that was tuned on captures, what another
    card measured none of this card's own, nor do times that were noisy or throttled replace what is
    held. Nothing is written where nothing changes.

    Args:
        path: a `<device_slug>/<family>.json`; folders are made as needed.
        entries: what was tuned.
        family: op family of the file.
        facts: the device of the file.
        toolchain: versions written to the header.
        min_gain: smallest lower bound of the gain worth an entry, e.g. 0.01 for 1 %.

    Raises:
        ConfigError: the file that is there is damaged or another device's; it is left untouched. Or
            an entry is unsound.
        OutputError: the file cannot be written.
    """
    for entry in entries:
        for problem in load.entry_problems(entry):
            raise ConfigError(f"an entry to be merged into {path}: {problem}")
    path = Path(path)
    with store.locked(path):
        current = _current(path, family, facts)
        held = {entry.key: entry for entry in current.entries} if current else {}
        merged, report = _merged(held, entries, min_gain)
        if report.added or report.replaced:
            file = RegistryFile(SCHEMA_VERSION, family, facts, toolchain, _with_ranges(merged))
            files.write_atomically(path, store.text_of(file))
            lookup.clear()
    return report


def price(path: str | Path, times: Prices, *, limit: float, drop: bool) -> tuple[AnyKey, ...]:
    """Write the measured regions of a registry file's entries into it, under its lock.

    Args:
        path: the file.
        times: milliseconds of configs by the key that they were timed at.
        limit: loss that a region may have.
        drop: take out the entries that are not needed for all priced lengths to stay within it.

    Returns:
        The keys whose entries changed or went.

    Raises:
        ConfigError: the file is missing or damaged.
        OutputError: it cannot be written.
    """
    path = Path(path)
    with store.locked(path):
        file = load.read(path)
        priced = regions.priced(file.entries, times, limit)
        gone = set(regions.redundant(priced, limit)) if drop else set()
        kept = tuple(entry for entry in priced if entry not in gone)
        if kept != file.entries:
            text = store.text_of(dataclasses.replace(file, entries=kept))
            files.write_atomically(path, text)
            lookup.clear()
    before = {entry.key: entry for entry in file.entries}
    return tuple(e.key for e in priced if e in gone or before[e.key] != e)


def _current(path: Path, family: str, facts: DeviceFacts) -> RegistryFile | None:
    if not os.path.lexists(path):
        return None
    file = load.read(path)
    if reason := load.foreign_reason(file, facts, family):
        raise ConfigError(f"{path}: {reason}; move it away or choose another folder")
    return file


def _merged(
    held: dict[AnyKey, AnyEntry], entries: Iterable[AnyEntry], min_gain: float
) -> tuple[list[AnyEntry], MergeReport]:
    merged = dict(held)
    added, replaced, kept = [], [], []
    for entry in entries:
        old = merged.get(entry.key)
        if refusal := _refusal(entry, old, min_gain):
            kept.append((entry.key, refusal))
            continue
        same = old is not None and old.config == entry.config
        merged[entry.key] = _with_region(entry, old) if same and old is not None else entry
        if old is None:
            added.append((entry.key, "confirmed" if entry.evidence.confirmed else "new"))
        else:
            replaced.append((entry.key, "evidence renewed" if same else "another config won"))
    report = MergeReport(tuple(added), tuple(replaced), tuple(kept))
    return list(merged.values()), report


def _with_region(entry: AnyEntry, old: AnyEntry) -> AnyEntry:
    """Keep the region that was priced for the same config, if the software is the same."""
    if old.regret is None or entry.regret is not None:
        return entry
    if staleness.changes(old, entry.evidence.toolchain):
        return entry
    return with_ranges(entry, ranges(old), regret=old.regret)


def _refusal(entry: AnyEntry, old: AnyEntry | None, min_gain: float) -> str | None:
    evidence = entry.evidence
    if not evidence.confirmed and not evidence.gain_low > min_gain:
        return (
            f"the gain's lower bound {evidence.gain_low:.2%} does not beat the smallest gain "
            f"worth an entry, {min_gain:.2%}"
        )
    if old is None:
        return None
    if evidence.synthetic and not old.evidence.synthetic:
        return "an entry tuned on captures is there, synthetic inputs do not replace it"
    if evidence.measured_on and not old.evidence.measured_on:
        return "this card measured its own, what another card measured does not replace it"
    if (old.config, old.evidence) == (entry.config, evidence):
        return ALREADY_THERE
    if evidence.stamp not in TRUSTED and entry.key.variant not in NO_SPEEDS:
        return f"its times are {evidence.stamp}, which replaces nothing that is held"
    return None


def _with_ranges(entries: list[AnyEntry]) -> tuple[AnyEntry, ...]:
    """Widen the lengths that entries may serve: towards measured neighbours, at most by `REACH`.

    The outermost measured lengths of the same discrete fields are never passed, so that one
    measurement alone serves its own length only.
    """
    groups: dict[tuple[object, ...], list[AnyEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.key.discrete(), []).append(entry)
    return tuple(
        entry
        if entry.regret is not None  # its region was measured
        else with_ranges(entry, _reached(entry, group))
        for group in groups.values()
        for entry in group
    )


def _reached(entry: AnyEntry, group: Sequence[AnyEntry]) -> dict[str, tuple[int, int]]:
    own = ranges(entry)
    return {
        name: _reach(length, own[name], [ranges(other)[name] for other in group])
        for name, length in lengths(entry.key).items()
    }


def _reach(length: int, own: tuple[int, ...], measured: list[tuple[int, ...]]) -> tuple[int, int]:
    lowest, highest = min(r[0] for r in measured), max(r[1] for r in measured)
    low, high = -(-length // REACH), length * REACH
    return min(own[0], max(low, lowest)), max(own[1], min(high, highest))
