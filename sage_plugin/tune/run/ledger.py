"""The ledger: every trial of a run, one JSON line each, never rewritten.

A line is on the disk before the next trial starts. A torn line (the machine went down while it was
written) costs that trial alone: the reader skips it and the writer starts a new line after it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError, OutputError
from sage_plugin.schema import AnyLaunch, Trial

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 2**10

LATEST_S = 253_402_300_799.0
"""The end of the year 9999, the last that a date can name."""


class Ledger:
    """Trials by study, stage and config; a later line replaces an earlier one of the same three.

    Several lanes may append. Without a path trials are kept in memory alone.

    Raises:
        OutputError: the file exists and cannot be read.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.damaged_lines = 0
        self._lock = threading.Lock()
        self._trials: dict[tuple[str, str], dict[AnyLaunch, Trial]] = {}
        for trial in self._read():
            self._remember(trial)

    def trials(self, study: str, stage: str) -> dict[AnyLaunch, Trial]:
        """Return the last trial of each config in a study's stage, in the order of first lines."""
        with self._lock:
            return dict(self._trials.get((study, stage), {}))

    def all(self) -> list[Trial]:
        """List every trial that stands, study by study."""
        with self._lock:
            return [trial for trials in self._trials.values() for trial in trials.values()]

    def append(self, trial: Trial) -> Trial:
        """Add a trial and wait until it is on the disk.

        Raises:
            OutputError: the file cannot be written.
        """
        try:
            line = files.dumps(trial.to_json())
        except ConfigError:
            trial = _without_numbers(trial)
            line = files.dumps(trial.to_json())
        with self._lock:
            if self.path is not None:
                with files.writing(self.path):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                files.append_line(self.path, line)
            self._remember(trial)
        return trial

    def _remember(self, trial: Trial) -> None:
        self._trials.setdefault((trial.study, trial.stage), {})[trial.config] = trial

    def _read(self) -> Iterator[Trial]:
        if self.path is None or not os.path.lexists(self.path):
            return
        try:
            for number, line in enumerate(files.read_lines(self.path, MAX_LINE_BYTES), start=1):
                where = f"{self.path} line {number}"
                if line is None:
                    self._skip(where, f"it is longer than {MAX_LINE_BYTES} bytes")
                elif line.strip():
                    yield from self._parsed(line, where)
        except ConfigError as error:
            raise OutputError(str(error)) from error

    def _parsed(self, line: bytes, where: str) -> Iterator[Trial]:
        try:
            trial = Trial.from_json(files.loads(line.decode("utf-8", errors="replace"), "it"))
        except ConfigError as error:
            self._skip(where, str(error))
            return
        if 0 <= trial.extra.get("finished_at", 0.0) <= LATEST_S:
            yield trial
        else:
            self._skip(where, "it ended at no time of a calendar")

    def _skip(self, where: str, why: str) -> None:
        self.damaged_lines += 1
        logger.warning("%s is skipped and its trial runs again: %s", where, why)


def _without_numbers(trial: Trial) -> Trial:
    """A trial whose measurements were not all finite; it cannot count as measured."""
    reason = f"{trial.reason} (its numbers were not all finite)".strip()
    status = "run_error" if trial.status == "ok" else trial.status
    return dataclasses.replace(
        trial, status=status, reason=reason, time=None, kernel_time=None, errors=None, extra={}
    )
