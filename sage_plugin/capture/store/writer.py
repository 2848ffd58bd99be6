"""Writes a capture folder so that it is whole at every moment, whenever the process dies."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sage_plugin import files
from sage_plugin.capture.store.manifest import (
    COUNTS,
    MANIFEST,
    CallCounts,
    append_record,
    read_manifest,
    write_counts,
    write_manifest,
)
from sage_plugin.capture.store.paths import SUFFIX, is_plain_name
from sage_plugin.errors import CaptureError, OutputError
from sage_plugin.schema import CaptureRecord

HEADER_KEY = "sage_plugin_capture"


class CaptureWriter:
    """The writing side of one capture folder.

    Args:
        folder: created with its parents if it does not exist.
        overwrite: replace the captures that the folder holds, once there is a new one.
    """

    def __init__(self, folder: Path, *, overwrite: bool = False) -> None:
        self.folder = Path(os.path.abspath(folder))  # the model's script may change directory
        self.overwrite = overwrite
        self._records: dict[str, CaptureRecord] = {}
        self._sizes: dict[str, int] = {}
        self._next = 0
        self._made_folder = False
        self._stale: tuple[CaptureRecord, ...] | None = None

    @property
    def records(self) -> tuple[CaptureRecord, ...]:
        """What the manifest lists now."""
        return tuple(self._records.values())

    @property
    def total_bytes(self) -> int:
        """Size of the capture files."""
        return sum(self._sizes.values())

    def open(self) -> None:
        """Make the folder ready, or say why it is not; nothing of anyone else's is touched.

        Raises:
            CaptureError: it holds captures and `overwrite` is off, or other files.
            OutputError: it cannot be made or written.
        """
        with _writing(self.folder):
            if self.folder.exists() and not self.folder.is_dir():
                raise OutputError(f"{self.folder} is a file: name a folder for the captures")
            former = (self.folder / MANIFEST).exists()
            if former:
                self._stale = self._former_captures()
            elif self.folder.exists() and _foreign_names(self.folder):
                names = ", ".join(_foreign_names(self.folder)[:3])
                raise CaptureError(
                    f"{self.folder} is no capture folder and not empty ({names}): name a new folder"
                )
            self._made_folder = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / MANIFEST, "a" if former else "x", encoding="utf-8"):
                pass  # an index marks the folder as ours, and shows that it can be written

    def save(self, tensors: dict[str, torch.Tensor], record: CaptureRecord) -> CaptureRecord:
        """Write one capture, then its manifest line.

        Args:
            tensors: contiguous CPU tensors.
            record: the line, but for `file` and `sha256`.

        Returns:
            The complete line.

        Raises:
            OutputError: the disk is full or the folder is gone; no part of the capture remains.
        """
        path = self._free_path()
        header = {HEADER_KEY: json.dumps({**record.to_json(), "file": path.name})}
        with _writing(self.folder):
            try:
                with files.replacing(path) as temporary:
                    save_file(tensors, str(temporary), metadata=header)
                    complete = dataclasses.replace(record, file=path.name, sha256=_hash(temporary))
                    size = temporary.stat().st_size
                    if self._stale is not None:  # only now, when there is a new capture, whole
                        self._clear(self._stale)
                append_record(self.folder, complete)
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                raise
        self._records[path.name] = complete
        self._sizes[path.name] = size
        return complete

    def delete(self, record: CaptureRecord) -> None:
        """Take one of this writer's captures back: its line first, then its file."""
        with _writing(self.folder):
            del self._records[record.file]
            write_manifest(self.folder, self.records)
            (self.folder / record.file).unlink(missing_ok=True)
            del self._sizes[record.file]

    def write_counts(self, counts: CallCounts) -> None:
        """Replace `counts.json`, once there is a capture."""
        if self._stale is None:
            with _writing(self.folder):
                write_counts(self.folder, counts)

    def close(self, counts: CallCounts) -> None:
        """Write the final counts; without a capture, leave what was there before `open`."""
        if self._records:
            self.write_counts(counts)
        if self._records or self._stale is not None:
            return
        with contextlib.suppress(OSError):
            for name in (COUNTS, MANIFEST):
                (self.folder / name).unlink(missing_ok=True)
            if self._made_folder:
                self.folder.rmdir()

    def _former_captures(self) -> tuple[CaptureRecord, ...]:
        """The captures that are to be replaced."""
        records = read_manifest(self.folder).records
        if not self.overwrite:
            raise CaptureError(
                f"{self.folder} already holds {len(records)} captures: replace them with "
                "--overwrite (overwrite=True), or name another folder"
            )
        return records

    def _clear(self, stale: tuple[CaptureRecord, ...]) -> None:
        """Delete what the folder's own manifest listed, and nothing else."""
        with _writing(self.folder):
            write_manifest(self.folder, ())
            for name in (COUNTS, *(r.file for r in stale if is_plain_name(r.file))):
                (self.folder / name).unlink(missing_ok=True)
        self._stale = None

    def _free_path(self) -> Path:
        """The next numbered name that no file has."""
        while True:
            path = self.folder / f"{self._next:06d}{SUFFIX}"
            self._next += 1
            if not path.exists():
                return path


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what the system says about writing into one sentence of ours."""
    try:
        yield
    except (OutputError, CaptureError):
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{folder} cannot be written: {reason}") from error


def _foreign_names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
