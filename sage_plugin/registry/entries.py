"""Registry entries of any family: how one is made, and the calls that it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sage_plugin.json_record import record_from_json
from sage_plugin.paged_records import PAGED_ATTENTION, PagedKey
from sage_plugin.schema import (
    ATTENTION,
    GROUPED_LINEAR,
    LINEAR,
    AnyEntry,
    AnyKey,
    AnyLaunch,
    CallKey,
    EntryEvidence,
    LinearEntry,
    LinearKey,
    PagedEntry,
    RegistryEntry,
)

RECORDS: dict[str, type[AnyEntry]] = {
    ATTENTION: RegistryEntry,
    LINEAR: LinearEntry,
    GROUPED_LINEAR: LinearEntry,
    PAGED_ATTENTION: PagedEntry,
}
"""The record of an entry by its family."""

Span = tuple[int, int]


def entry_of(key: AnyKey, config: AnyLaunch, evidence: EntryEvidence) -> AnyEntry:
    """Make an entry that serves the lengths of its own key alone."""
    spans = {f"{name}_range": (length, length) for name, length in lengths(key).items()}
    record: Any = RECORDS[key.family]
    entry: AnyEntry = record(key=key, config=config, evidence=evidence, **spans)
    return entry


def key_from_json(data: object) -> AnyKey:
    """Check and build a key of any family."""
    key: AnyKey = record_from_json(data, (CallKey, LinearKey, PagedKey))
    return key


def entry_from_json(data: object) -> AnyEntry:
    """Check and build an entry of any family."""
    entry: AnyEntry = record_from_json(data, RECORDS.values())
    return entry


def lengths(key: AnyKey) -> dict[str, int]:
    """Return the lengths of a call by their names."""
    return {name: getattr(key, name) for name in key.LENGTHS}


def ranges(entry: AnyEntry) -> dict[str, Span]:
    """Return the lowest and highest of each number that an entry has a range of."""
    found = {name: getattr(entry, f"{name}_range", None) for name in entry.key.NUMBERS}
    return {name: span for name, span in found.items() if span is not None}


def with_ranges(entry: AnyEntry, spans: Mapping[str, Span], **changes: object) -> AnyEntry:
    """Return an entry that serves other numbers, and has other changes."""
    changed: Any = {f"{name}_range": span for name, span in spans.items()} | changes
    return dataclasses.replace(entry, **changed)
