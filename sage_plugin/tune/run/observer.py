"""Who is told how a session goes; the command line draws it, tests listen, nobody has to."""

from __future__ import annotations

from typing import Protocol

from sage_plugin.schema import Trial
from sage_plugin.tune.run.study import Study


class Observer(Protocol):
    """Called from the session's own thread."""

    def study_started(self, study: Study, *, done: int, total: int) -> None:
        """A study begins; `done` of its `total` configs are in the ledger from an earlier run."""

    def trial_finished(self, study: Study, trial: Trial) -> None:
        """A config was screened just now."""

    def race_started(self, study: Study, finalists: int) -> None:
        """The finalists are being timed."""

    def study_finished(self, study: Study, verdict: str) -> None:
        """A study ended as `tuned`, `confirmed` or `failed`."""


class Silent:
    """An observer that does nothing."""

    def study_started(self, study: Study, *, done: int, total: int) -> None:
        """Nothing."""

    def trial_finished(self, study: Study, trial: Trial) -> None:
        """Nothing."""

    def race_started(self, study: Study, finalists: int) -> None:
        """Nothing."""

    def study_finished(self, study: Study, verdict: str) -> None:
        """Nothing."""
