"""The index of a capture folder: `manifest.jsonl`, one line per capture, and `counts.json`.

A line is appended after its tensor file is in place, so that a reader never meets a line without a
file, whenever the writer dies. A last line that was cut short is reported and left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sage_plugin import files
from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.store.checks import KINDS
from sage_plugin.errors import CaptureError, ConfigError
from sage_plugin.schema import ATTENTION, SCHEMA_VERSION, AnyShape, JsonRecord

MANIFEST = "manifest.jsonl"
COUNTS = "counts.json"
MAX_INDEX_BYTES = 64 * 2**20
MAX_LINE_BYTES = 2**20
MOST_PROBLEMS = 100

_LINE = re.compile(r"[^\n]*(?:\n|\Z)")  # one by one: a foreign file may have millions


@dataclass(frozen=True, slots=True)
class ShapeCount(JsonRecord):
    """How many calls had one shape."""

    shape: AnyShape
    calls: int


@dataclass(frozen=True, slots=True)
class LayerCalls(JsonRecord):
    """The calls of one layer that had one shape.

    Attributes:
        layer: module path, with the component in front.
        shape: number of the shape in `CallCounts.shapes`, from 0.
        calls: calls at each denoising step, from step 0, of all runs; one number for all of them
            where the model is called without a timestep.
    """

    layer: str
    shape: int
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallCounts(JsonRecord):
    """What a recording saw, saved or not.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the writer.
        complete: the recording ended in order; a killed run leaves its last periodic counts.
        layers: calls by layer path.
        steps: forwards by component.
        shapes: calls by shape, most frequent first.
        skipped: calls that are in no capture, by reason.
        denoising_steps: steps of the longest run, `None` where models are called without timestep.
        runs: denoising runs; 0 in records of earlier releases.
        layer_calls: calls by layer, shape and denoising step; those too short to be saved, such as
            the steps of a language model that write a token, are not among them.
        families: op family by layer, of those that are not attention.
    """

    schema_version: int = SCHEMA_VERSION
    complete: bool = False
    layers: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    shapes: tuple[ShapeCount, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    denoising_steps: int | None = None
    runs: int = 0
    layer_calls: tuple[LayerCalls, ...] = ()
    families: dict[str, str] = field(default_factory=dict)

    def of(self, family: str) -> dict[str, int]:
        """Return the calls of an op family by layer."""
        return {n: c for n, c in self.layers.items() if self.families.get(n, ATTENTION) == family}

    @property
    def total(self) -> int:
        """Calls of all layers."""
        return sum(self.layers.values())


@dataclass(frozen=True, slots=True)
class Manifest:
    """The readable lines of a manifest, and a sentence for each other one."""

    records: tuple[CaptureRecord, ...]
    problems: tuple[str, ...]


def read_manifest(folder: Path) -> Manifest:
    """Read the index of a capture folder.

    Raises:
        CaptureError: there is no manifest, it cannot be read, or it has another schema version.
    """
    path = folder / MANIFEST
    records: list[CaptureRecord] = []
    problems: list[str] = []
    for number, match in enumerate(_LINE.finditer(_read_text(path)), start=1):
        line = match[0]
        if not line.strip():
            continue
        try:
            records.append(_parse_line(line, path))
        except ConfigError as error:
            if len(problems) == MOST_PROBLEMS:
                problems.append(f"{MANIFEST} has further damaged lines; the rest is left out")
                break
            cut = not line.endswith("\n")
            what = "was cut short while it was written" if cut else f"is damaged ({error})"
            problems.append(f"{MANIFEST} line {number} {what}; it is left out")
    return Manifest(tuple(records), tuple(problems))


def append_record(folder: Path, record: CaptureRecord) -> None:
    """Add one line and wait until it is on the disk; a line that does not fit is taken back."""
    files.append_line(folder / MANIFEST, _line(record))


def write_manifest(folder: Path, records: Iterable[CaptureRecord]) -> None:
    """Replace the manifest by one of these records, all at once."""
    text = "".join(_line(record) + "\n" for record in records)
    files.write_atomically(folder / MANIFEST, text, follow=False)


def write_counts(folder: Path, counts: CallCounts) -> None:
    """Replace `counts.json`, all at once."""
    files.write_json(folder / COUNTS, counts.to_json(), follow=False)


def read_counts(folder: Path) -> CallCounts:
    """Read `counts.json`.

    Raises:
        CaptureError: it is missing, damaged or of another schema version.
    """
    path = folder / COUNTS
    text = _read_text(path)
    try:
        data = files.loads(text, "it")
        _check_version(data, path)
        return CallCounts.from_json(data)
    except ConfigError as error:
        raise CaptureError(f"{path} is damaged: {error}") from error


def _line(record: CaptureRecord) -> str:
    return json.dumps(record.to_json(), separators=(",", ":"))


def _parse_line(line: str, path: Path) -> CaptureRecord:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"longer than {MAX_LINE_BYTES} bytes")
    data = files.loads(line, "the line")
    _check_version(data, path)
    family = data.get("family") if isinstance(data, dict) else None
    if isinstance(family, str) and family not in KINDS:
        raise ConfigError(f"op family {family!r}, expected {' or '.join(map(repr, KINDS))}")
    return KINDS[family if isinstance(family, str) else ATTENTION].record.from_json(data)


def _check_version(data: object, path: Path) -> None:
    found = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(found, int) and found != SCHEMA_VERSION:
        raise CaptureError(
            f"{path} has schema version {found} and this sage_plugin reads {SCHEMA_VERSION}: "
            "record again, or use the version that wrote it"
        )


def _read_text(path: Path) -> str:
    """The text of an index file that may come from anywhere."""
    try:
        data = files.read_bytes(path, MAX_INDEX_BYTES, "index of ours")
    except ConfigError as error:
        raise CaptureError(str(error)) from error
    return data.decode("utf-8", errors="replace")
