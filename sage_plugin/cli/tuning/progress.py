"""How a tuning session is followed: a bar for each call on a terminal, lines in a log."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from sage_plugin.cli.tune_view import RESULT_WORDS, milliseconds
from sage_plugin.errors import number_of
from sage_plugin.families import describe
from sage_plugin.schema import NO_SPEEDS, Trial
from sage_plugin.tune.run.observer import Observer
from sage_plugin.tune.run.study import Study

LINE_EVERY_S = 30.0
"""A log gets a line about a call at most so often, and at its beginning and end."""


class _Call:
    """How the search of one call goes."""

    def __init__(self, study: Study, done: int, total: int) -> None:
        self.name = f"{study.key.kernel} {describe(study.timed.shape)}"
        self.tried, self.total, self.failed = done, total, 0
        self.best = float("inf")
        self.task: TaskID | None = None
        self.said_at = time.monotonic()

    def state(self) -> str:
        """The best time and the failures so far."""
        best = "" if self.best == float("inf") else f"best {milliseconds(self.best)}"
        failed = f"{self.failed} failed" if self.failed else ""
        return ", ".join(part for part in (best, failed) if part)


class ProgressView(Observer):
    """An observer that draws one line per study, or prints lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self._console = console
        self._bars = Progress(*columns, console=console) if console.is_terminal else None
        self._calls: dict[str, _Call] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> ProgressView:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def study_started(self, study: Study, *, done: int, total: int) -> None:
        """Begin a line, that starts where an earlier run stopped."""
        with self._lock:
            call = self._calls[study.id] = _Call(study, done, total)
            state = f"{done} from an earlier run" if done else ""
            if self._bars is not None:
                call.task = self._bars.add_task(call.name, total=total, completed=done, state=state)
            else:
                self._say(call, number_of(total, "config") + (f", {state}" if state else ""))

    def trial_finished(self, study: Study, trial: Trial) -> None:
        """Count a trial, and show the best time."""
        with self._lock:
            call = self._calls[study.id]
            call.tried += 1
            call.failed += trial.status != "ok"
            if trial.time is not None and study.key.variant not in NO_SPEEDS:
                call.best = min(call.best, trial.time.median_ms)
            self._update(call, call.state(), now=False)

    def race_started(self, study: Study, finalists: int) -> None:
        """Say that the finalists are being timed."""
        with self._lock:
            self._update(
                self._calls[study.id], f"racing {number_of(finalists, 'finalist')}", now=True
            )

    def study_finished(self, study: Study, verdict: str) -> None:
        """End the line with the verdict."""
        with self._lock:
            self._update(self._calls[study.id], RESULT_WORDS.get(verdict, verdict), now=True)

    def _update(self, call: _Call, state: str, *, now: bool) -> None:
        if self._bars is not None and call.task is not None:
            self._bars.update(call.task, completed=call.tried, state=state)
        elif now or time.monotonic() - call.said_at >= LINE_EVERY_S:
            self._say(call, f"{call.tried}/{call.total} tried" + (f", {state}" if state else ""))

    def _say(self, call: _Call, words: str) -> None:
        call.said_at = time.monotonic()
        self._console.print(f"{call.name}: {words}", markup=False, highlight=False, soft_wrap=True)
