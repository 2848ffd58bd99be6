"""Who follows how a session goes: the command line draws it, tests listen, by default nobody."""

from __future__ import annotations

from sage_plugin.schema import Trial
from sage_plugin.tune.run.study import Study


class Observer:
    """Does nothing; a subclass overrides what it wants. Called from the session's own thread."""

    def study_started(self, study: Study, *, done: int, total: int) -> None:
        """Begin a study; `done` of its `total` configs are in the ledger from an earlier run."""

    def trial_finished(self, study: Study, trial: Trial) -> None:
        """Take note that a config was screened just now."""

    def race_started(self, study: Study, finalists: int) -> None:
        """Take note that the finalists are being timed."""

    def study_finished(self, study: Study, verdict: str) -> None:
        """End a study as `tuned`, `confirmed` or `failed`."""
