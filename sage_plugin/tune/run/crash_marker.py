"""The configs that run right now, noted on disk: what ends the whole session is met only twice.

A trial that ends its process is a line in the ledger. One that ends the session leaves no line, and
would be tried again at every resume. Whoever ended the session, it says nothing about the config:
it is passed over and never called a crasher.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.schema import AnyLaunch

ATTEMPTS = 2
MAX_BYTES = 2**20


class CrashMarker:
    """The note of one run folder: how many sessions ended while a config ran; for all its lanes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._attempts = self._read()

    def begin(self, study: str, config: AnyLaunch) -> bool:
        """Note that a config is about to run; false where it is to be passed over.

        Raises:
            OutputError: the note cannot be written.
        """
        name = f"{study} {config.text()}"
        with self._lock:
            attempts = self._attempts.get(name, 0)
            if attempts >= ATTEMPTS:
                return False
            self._attempts[name] = attempts + 1
            self._write()
        return True

    def end(self, study: str, config: AnyLaunch) -> None:
        """Note that the config is done and recorded, or that the user stopped it."""
        with self._lock:
            self._attempts.pop(f"{study} {config.text()}", None)
            with contextlib.suppress(OSError):
                if self._attempts:
                    self._write()
                else:
                    self._path.unlink()

    def _write(self) -> None:
        files.write_atomically(self._path, files.dumps(self._attempts) + "\n", follow=False)

    def _read(self) -> dict[str, int]:
        with contextlib.suppress(ConfigError):
            data = files.read_json(self._path, MAX_BYTES, "note")
            if isinstance(data, dict):
                return {name: count for name, count in data.items() if type(count) is int}
        return {}
