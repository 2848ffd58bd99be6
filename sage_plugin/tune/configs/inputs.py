"""What is tuned on: recorded calls grouped by their key, or synthetic ones of given shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.selection.reduce import pick
from sage_plugin.capture.store.reader import CaptureFolder, open_captures
from sage_plugin.errors import CaptureError
from sage_plugin.families import ATTENTION, Family
from sage_plugin.families import family as family_of
from sage_plugin.families.family import Shape
from sage_plugin.kernels.contract import Decision
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import AnyKey, AnyShape

MAX_CAPTURES_PER_KEY = 3
ANY = Decision("any", "any")
"""Stands for all kernels in the key of a shape."""


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs of one call key: each candidate is judged on all of them and timed on one.

    Attributes:
        sources: the inputs.
        timed: the one of median size.
        calls: how many calls of this key the recording saw; 0 where it is unknown.
    """

    sources: tuple[ReplayInputs, ...]
    timed: ReplayInputs
    calls: int = 0

    @property
    def shape(self) -> Shape:
        """The full call."""
        return self.timed.shape

    @property
    def cost(self) -> int:
        """What this key costs a model: its calls times the operations of one."""
        return max(1, self.calls) * self.timed.family.flops(self.shape)


@dataclass(frozen=True, slots=True)
class TuningInputs:
    """The groups, the most expensive one first, and sentences on what was left out."""

    groups: tuple[InputGroup, ...]
    notes: tuple[str, ...] = ()


def from_captures(
    folder: str | Path, *, family: Family = ATTENTION, max_per_key: int = MAX_CAPTURES_PER_KEY
) -> TuningInputs:
    """Group the captures of an op family in a folder by call key.

    Each capture that is used is read once here: one with other contents than were recorded would
    fail every trial of its key. Such captures are left out and counted in a note.
    """
    captures = open_captures(folder, family.name)
    groups: dict[AnyKey, list[CaptureRecord]] = {}
    for record in captures.records:
        groups.setdefault(shape_key(record.shape), []).append(record)
    calls: Counter[AnyKey] = Counter()
    for count in captures.call_counts.shapes:
        if count.shape.family == family.name:
            calls[shape_key(count.shape)] += count.calls
    place = str(captures.path.resolve())
    built, damaged = [], list[str]()
    for key, records in groups.items():
        chosen = sorted(
            _sound(captures, records, max_per_key, damaged),
            key=lambda r: (r.size, r.sha256),
        )
        if not chosen:
            continue
        sources = tuple(ReplayInputs(r.shape, folder=place, record=r) for r in chosen)
        built.append(InputGroup(sources, sources[len(sources) // 2], calls[key]))
    notes = list(captures.problems)
    if damaged:
        some = f"{len(damaged)} captures are damaged and left out: {', '.join(damaged)}"
        notes.append(some if len(damaged) > 1 else f"{damaged[0]}; it is left out")
    if not built:
        raise CaptureError(
            f"{captures.path}: no capture is sound: {'; '.join(notes)}; record again"
        )
    if len(built) < len(groups):
        notes.append(f"{len(groups) - len(built)} calls have no sound capture and are not tuned")
    return TuningInputs(_by_cost(built), tuple(notes))


def _sound(
    captures: CaptureFolder, records: Sequence[CaptureRecord], n: int, damaged: list[str]
) -> tuple[CaptureRecord, ...]:
    """At most `n` captures whose contents are as recorded; sentences on others go to `damaged`."""
    sound: set[str] = set()
    while records:
        chosen = pick(records, n)
        found = {r.file: captures.damage(r) for r in chosen if r.file not in sound}
        bad = {file: text for file, text in found.items() if text is not None}
        if not bad:
            return chosen
        damaged += bad.values()
        sound |= found.keys() - bad.keys()
        records = [r for r in records if r.file not in bad]
    return ()


def from_drawn(inputs: Iterable[ReplayInputs]) -> TuningInputs:
    """Group drawn inputs: each is a group of its own, and equal shapes are one."""
    by_shape = {source.shape: source for source in inputs}
    return TuningInputs(_by_cost([InputGroup((one,), one) for one in by_shape.values()]))


def shape_key(shape: AnyShape) -> AnyKey:
    """Return what the calls of one group share, whatever kernel takes them."""
    key: AnyKey = family_of(shape.family).call_key(shape, ANY)
    return key


def _by_cost(groups: Sequence[InputGroup]) -> tuple[InputGroup, ...]:
    def place(group: InputGroup) -> tuple[object, ...]:
        key = group.timed.family.call_key(group.shape, ANY)
        return -group.cost, key.discrete()

    return tuple(sorted(groups, key=place))
