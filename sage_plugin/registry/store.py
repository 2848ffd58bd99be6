"""How a registry file is written: one text form, one writer at a time, all or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.errors import OutputError
from sage_plugin.schema import AnyEntry, RegistryFile

LOCK_TIMEOUT_S = 60.0
OPTIONAL = ("batch_heads_range",)
"""Fields of entries that files of earlier releases do not have."""


def text_of(file: RegistryFile) -> str:
    """Write a registry file: sorted entries, a line per flat record, hence small diffs."""
    ordered = sorted(file.entries, key=lambda entry: (entry.key.discrete(), entry.key.numbers()))
    data = file.to_json()
    data["entries"] = [_entry(one) for one in ordered]
    return _lines(data, "") + "\n"


def _entry(entry: AnyEntry) -> dict[str, Any]:
    """An entry as JSON; a range of batches that was not measured is left out."""
    data = entry.to_json()
    return {name: v for name, v in data.items() if v is not None or name not in OPTIONAL}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the writers' lock of a file: its sibling `.lock`, which the kernel frees if we die."""
    import filelock

    target = Path(os.path.realpath(path))
    lock_path = target.with_name(f"{target.name}.lock")
    with files.writing(path):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(lock_path, timeout=LOCK_TIMEOUT_S):
                files.remove_strays(target, older_than_s=0)  # the lock says that no writer is alive
                yield
        except filelock.Timeout:
            raise OutputError(
                f"{path}: another process has held {lock_path.name} for {LOCK_TIMEOUT_S:.0f} s; "
                "wait for it to end and run the command again"
            ) from None


def _lines(value: object, indent: str) -> str:
    if isinstance(value, dict) and any(_nested(v) for v in value.values()):
        inner = indent + "  "
        body = ",\n".join(
            f"{inner}{files.dumps(name)}: {_lines(item, inner)}" for name, item in value.items()
        )
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(v, dict) for v in value):
        inner = indent + "  "
        body = ",\n".join(f"{inner}{_lines(item, inner)}" for item in value)
        return f"[\n{body}\n{indent}]"
    return files.dumps(value)


def _nested(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(isinstance(v, dict) for v in value)
    )
