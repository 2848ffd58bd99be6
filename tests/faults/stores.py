"""What this package keeps on a disk: how each kind is written, bit by bit, and read again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sage_plugin import files
from sage_plugin.capture.store.manifest import CallCounts, ShapeCount, read_counts, read_manifest
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.errors import SageError
from sage_plugin.plugin.policy import rules
from sage_plugin.registry import load
from sage_plugin.schema import Trial
from sage_plugin.tune.configs import space_file
from sage_plugin.tune.policy import sensitivity_file, times_file
from sage_plugin.tune.run.ledger import Ledger
from tests.capture.toys import line, shape, tensors
from tests.faults.registry_writer import write
from tests.registry import samples

Written = Iterator[object]


@dataclass(frozen=True)
class Store:
    """One kind of file or folder.

    Attributes:
        write: adds things under a path and yields each once it is acknowledged.
        read: the set of things that a path holds; a `SageError` where it holds none.
    """

    write: Callable[[Path], Written]
    read: Callable[[Path], set[object]]


def trial(number: int) -> Trial:
    return Trial(f"study {number}", samples.config(block_m=1 + number), "screen", "ok")


def _write_ledger(path: Path) -> Written:
    ledger = Ledger(path)
    for number in range(3):
        with _refused():
            ledger.append(trial(number))
            yield number


def _read_ledger(path: Path) -> set[object]:
    return {int(one.study.split()[1]) for one in Ledger(path).all()}


def _write_registry(path: Path) -> Written:
    for number in range(2):
        with _refused():
            write(path, number, 1)
            yield number


def _read_registry(path: Path) -> set[object]:
    return {entry.key.seq_q - 64 for entry in load.read(path).entries}


def _write_json(path: Path) -> Written:
    for number in range(3):
        with _refused():
            files.write_json(path, [number])
            yield number


def _read_json(path: Path) -> set[object]:
    (number,) = files.read_json(path, 1000, "list")
    return set(range(number + 1))


def _write_captures(path: Path) -> Written:
    writer = CaptureWriter(path)
    try:
        with _refused():
            writer.open()
        for number in range(3):
            with _refused():
                writer.save(tensors(number), line(step=number))
                yield number
    finally:
        with _refused():
            writer.close(CallCounts(complete=True))


def _read_captures(path: Path) -> set[object]:
    folder = open_captures(path)
    assert all(folder.load(record) for record in folder.records)
    return {record.step for record in folder.records}


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Nothing but a sentence of ours may come out."""
    with contextlib.suppress(SageError):
        yield


STORES = {
    "ledger": Store(_write_ledger, _read_ledger),
    "registry": Store(_write_registry, _read_registry),
    "results": Store(_write_json, _read_json),
    "captures": Store(_write_captures, _read_captures),
}


def _counts(path: Path) -> CallCounts:
    return read_counts(path.parent)


def _manifest(path: Path) -> object:
    return read_manifest(path.parent)


LOADERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "ledger": ("ledger.jsonl", lambda path: Ledger(path).all()),
    "registry": ("attention.json", load.read),
    "manifest": ("manifest.jsonl", _manifest),
    "counts": ("counts.json", _counts),
    "policy": ("policy.json", rules.read),
    "space": ("space.json", space_file.read),
    "times": ("times.json", times_file.read),
    "sensitivity": ("sensitivity.json", sensitivity_file.read),
}
"""Name of a sound file, and what reads it: its content, or a `SageError`."""


def sound(folder: Path) -> dict[str, bytes]:
    """A sound file of each loader, made by what writes it."""
    made = folder / "made"
    made.mkdir()
    list(_write_ledger(made / "ledger.jsonl"))
    list(_write_registry(made / "attention.json"))
    list(_write_captures(made / "captures"))
    counts = CallCounts(layers={"a": 3}, shapes=(ShapeCount(shape(), 3),), runs=1)
    files.write_json(made / "counts.json", counts.to_json())
    files.write_json(
        made / "policy.json",
        {
            "schema_version": 1,
            "rules": [{"kernel": "sage", "layers": ["*.attn1"], "steps": "2:-2"}],
        },
    )
    files.write_json(made / "space.json", {"block_m": [64, 128], "num_warps": [4, 8]})
    row = {"note": "", "shape": shape().to_json(), "time": {"median_ms": 1.5}}
    rows = [{**row, "kernel": "sdpa"}, {**row, "kernel": "sage"}]
    files.write_json(made / "times.json", {"device": {"name": "x"}, "tables": [{"rows": rows}]})
    files.write_json(
        made / "sensitivity.json",
        {
            "schema_version": 1,
            "kernel": "sage",
            "cells": [{"layer": "a", "steps": ":", "rmse": 1}],
        },
    )
    found = {name: made / file for name, (file, _) in LOADERS.items() if name != "manifest"}
    found["manifest"] = made / "captures" / "manifest.jsonl"
    return {name: path.read_bytes() for name, path in found.items()}
