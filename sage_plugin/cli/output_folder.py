"""A command's output folder: replaced by its next run, while any other is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

from sage_plugin.errors import OutputError, UsageError


def prepare(folder: Path, *, marker: str, command: str) -> None:
    """Make an empty folder; one of an earlier run is replaced, any other is refused."""
    try:
        if folder.is_dir() and (folder / marker).is_file():
            shutil.rmtree(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"{folder} exists and is not the folder of an earlier `{command}`: name "
                "another with --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / marker).write_text(f"made by `{command}`, which replaces this folder\n")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error
