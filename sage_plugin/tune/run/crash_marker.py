"""The config that runs right now, noted on disk: what ends the whole session is met only twice.

A trial that ends its process is a line in the ledger. One that ends the session leaves no line, and
would be tried again at every resume.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.schema import LaunchConfig, Trial

ATTEMPTS = 2
MAX_BYTES = 64 * 2**10


class CrashMarker:
    """The note of one run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = self._read()

    def begin(self, study: str, config: LaunchConfig) -> Trial | None:
        """Note that a config is about to run.

        Raises:
            OutputError: the note cannot be written.
        """
        left_study, left_config, attempts = self._left
        again = (left_study, left_config) == (study, config.text())
        if again and attempts >= ATTEMPTS:
            reason = f"the session ended {attempts} times while this config ran"
            return Trial(study, config, "screen", "crashed", reason=reason)
        note = [study, config.text(), attempts + 1 if again else 1]
        files.write_atomically(self._path, files.dumps(note) + "\n", follow=False)
        return None

    def end(self) -> None:
        """Note that the config is done and recorded."""
        self._left = ("", "", 0)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _read(self) -> tuple[str, str, int]:
        with contextlib.suppress(ConfigError):
            data = files.read_json(self._path, MAX_BYTES, "note")
            if isinstance(data, list) and [type(item) for item in data] == [str, str, int]:
                return data[0], data[1], data[2]
        return "", "", 0
