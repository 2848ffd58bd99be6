"""Writes a capture folder so that it is whole at every moment, whenever the process dies."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sage_plugin import files
from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.store.manifest import (
    COUNTS,
    MANIFEST,
    CallCounts,
    append_record,
    read_manifest,
    write_counts,
    write_manifest,
)
from sage_plugin.capture.store.paths import NUMBERED, SUFFIX, WEIGHT, is_plain_name, printable
from sage_plugin.errors import CaptureError, OutputError

HEADER_KEY = "sage_plugin_capture"
LOCK = ".lock"


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
        self._stale: tuple[Path, ...] | None = None
        self._lock: Any = None

    @property
    def records(self) -> tuple[CaptureRecord, ...]:
        """What the manifest lists now."""
        return tuple(self._records.values())

    @property
    def total_bytes(self) -> int:
        """Size of the captures and the weights beside them."""
        return sum(self._sizes.values())

    def open(self) -> None:
        """Make the folder ready, or say why it is not; nothing of anyone else's is touched.

        Raises:
            CaptureError: it holds captures and `overwrite` is off, or other files, or another
                recording writes to it.
            OutputError: it cannot be made or written.
        """
        with _writing(self.folder):
            if not _is_utf8(str(self.folder)):
                raise OutputError(
                    f"{printable(str(self.folder))}: a name that is not UTF-8, in which captures "
                    "cannot be read again; name another folder"
                )
            if os.path.exists(self.folder) and not self.folder.is_dir():
                raise OutputError(f"{self.folder} is a file: name a folder for the captures")
            manifest = self.folder / MANIFEST
            if self.folder.exists() and not manifest.exists() and _foreign_names(self.folder):
                names = ", ".join(_foreign_names(self.folder)[:3])
                raise CaptureError(
                    f"{self.folder} is not empty and is not a capture folder ({names}): name a "
                    "new folder"
                )
            self._made_folder = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._acquire()
            try:
                former = manifest.exists()
                if former:
                    self._stale = self._former_files()
                # An index marks the folder as ours, and shows that it can be written.
                files.touch(manifest, new=not former)
            except BaseException:
                self._release()
                raise

    def _acquire(self) -> None:
        """Take the folder for this recording alone; the kernel gives it back if we die."""
        import filelock

        lock = filelock.FileLock(self.folder / LOCK, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise CaptureError(
                f"{self.folder} is being recorded into by another process: wait for it, or name "
                "another folder"
            ) from None
        self._lock = lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(
        self,
        tensors: dict[str, torch.Tensor],
        record: CaptureRecord,
        weight: torch.Tensor | None = None,
    ) -> CaptureRecord:
        """Write one capture, then its manifest line.

        Args:
            tensors: contiguous CPU tensors.
            record: the line, but for `file` and `sha256`.
            weight: what goes into the second of the record's files, unless that is here already.

        Returns:
            The complete line.

        Raises:
            OutputError: the disk is full or the folder is gone; no part of the capture remains.
        """
        path = self._free_path()
        header = {HEADER_KEY: json.dumps({**record.to_json(), "file": path.name})}
        with _writing(self.folder):
            if weight is not None:
                self._save_weight(record.files[1], weight)
            try:
                with files.replacing(path, follow=False) as temporary:
                    save_file(tensors, str(temporary), metadata=header)
                    complete = dataclasses.replace(record, file=path.name, sha256=_hash(temporary))
                    size = temporary.stat().st_size
                if self._stale is None:
                    append_record(self.folder, complete)
                else:
                    self._replace_former(self._stale, complete)
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                raise
        self._records[path.name] = complete
        self._sizes[path.name] = size
        return complete

    def delete(self, record: CaptureRecord) -> None:
        """Take one of this writer's captures back: its line first, then files that no other has."""
        with _writing(self.folder):
            del self._records[record.file]
            write_manifest(self.folder, self.records)
            shared = {name for one in self.records for name in one.files}
            for name in record.files:
                if name not in shared:
                    (self.folder / name).unlink(missing_ok=True)
                    del self._sizes[name]

    def _save_weight(self, name: str, weight: torch.Tensor) -> None:
        """Write a weight that no capture has brought along yet."""
        if name in self._sizes:
            return
        path = self.folder / name
        with files.replacing(path, follow=False) as temporary:
            save_file({"weight": weight}, str(temporary))
            self._sizes[name] = temporary.stat().st_size

    def write_counts(self, counts: CallCounts) -> None:
        """Replace `counts.json`, once there is a capture."""
        if self._stale is None:
            with _writing(self.folder):
                write_counts(self.folder, counts)

    def close(self, counts: CallCounts) -> None:
        """Write the final counts; without a capture, leave what was there before `open`."""
        try:
            if self._records:
                self.write_counts(counts)
            if self._records or self._stale is not None:
                return
            with contextlib.suppress(OSError):
                for name in (COUNTS, MANIFEST, LOCK):
                    (self.folder / name).unlink(missing_ok=True)
                if self._made_folder:
                    self.folder.rmdir()
        finally:
            self._release()

    def _former_files(self) -> tuple[Path, ...]:
        """The files that a new recording replaces: former captures, listed or left by a kill."""
        records = read_manifest(self.folder).records
        if not self.overwrite and not records:
            raise CaptureError(
                f"{self.folder} holds no usable line in its {MANIFEST}: replace it with "
                "--overwrite (overwrite=True), or name another folder"
            )
        if not self.overwrite:
            raise CaptureError(
                f"{self.folder} already holds {len(records)} captures: replace them with "
                "--overwrite (overwrite=True), or name another folder"
            )
        listed = {name for r in records for name in r.files if is_plain_name(name)}
        left = {
            p.name
            for p in self.folder.iterdir()
            if NUMBERED.fullmatch(p.name) or WEIGHT.fullmatch(p.name)
        }
        return tuple(self.folder / name for name in (COUNTS, *sorted(listed | left)))

    def _replace_former(self, stale: tuple[Path, ...], record: CaptureRecord) -> None:
        """List the first new capture in place of all former ones, and only then delete those."""
        write_manifest(self.folder, (record,))
        self._stale = None
        for path in stale:
            if path.name in record.files:
                continue
            with contextlib.suppress(OSError):  # what stays is in no line, and goes the next time
                path.unlink(missing_ok=True)

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
    except (OSError, ValueError, SafetensorError) as error:  # a path with NUL is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{folder} cannot be written: {reason}") from error


def _is_utf8(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _foreign_names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
