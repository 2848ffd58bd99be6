"""The real runner: every candidate in a child process, every way to fail turned into a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_plugin.kernels.build_error import by_compiler
from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.configs.search import TOO_LARGE
from sage_plugin.tune.configs.trial import JudgeJob, RaceJob, ScreenJob
from sage_plugin.tune.run.runner import Race, Resources
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.run.worker import Job, Reply, WorkerProcess

NO_ROOM = ("OutOfResources", "OutOfMemoryError")
"""Classes of exceptions that say that a config takes more than there is."""


class SubprocessRunner:
    """Runs trials in one lane.

    A child that dies may have been killed by something else (memory, an operator), so the same job
    gets one more child before its config is held to be at fault.
    """

    def __init__(self, *, timeout_s: float, log: Path | None = None) -> None:
        self._worker = WorkerProcess(
            timeout_s=timeout_s, log=log, preload="sage_plugin.tune.configs.trial"
        )

    def prepare(
        self, study: Study, configs: Sequence[LaunchConfig]
    ) -> Mapping[LaunchConfig, Resources]:
        """Take note as `Runner` says."""
        return {}

    def judge(self, study: Study, config: LaunchConfig) -> Trial:
        """Judge as `Runner` says."""
        reply = self._run(JudgeJob(study.problem, config))
        if reply.status == "done":
            trial: Trial = reply.value
            return trial
        return self._failed(study, config, "screen", reply)

    def screen(
        self, study: Study, judged: Sequence[Trial], base: LaunchConfig | None
    ) -> tuple[Trial, ...]:
        """Screen as `Runner` says; where a batch breaks, each of it is timed alone."""
        reply = self._run(ScreenJob(study.problem, tuple(judged), base))
        if reply.status == "done":
            trials: tuple[Trial, ...] = reply.value
            return trials
        if len(judged) == 1:
            return (self._failed(study, judged[0].config, "screen", reply),)
        self._mend(study, reply)
        return tuple(trial for one in judged for trial in self.screen(study, [one], base))

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        """Race as `Runner` says."""
        reply = self._run(RaceJob(study.problem, race))
        if reply.status == "done":
            trials: tuple[Trial, ...] = reply.value
            return trials
        return tuple(self._failed(study, c, "final", reply) for c in race.configs)

    def cancel(self) -> None:
        """End the child; who waits for it hears of Ctrl-C."""
        self._worker.cancel()

    def close(self) -> None:
        """End the child."""
        self._worker.close()

    def _run(self, job: Job) -> Reply:
        reply = self._worker.run(job)
        return self._worker.run(job) if reply.status == "crashed" else reply

    def _failed(self, study: Study, config: LaunchConfig, stage: str, reply: Reply) -> Trial:
        status = self._mend(study, reply)
        kind = reply.error.rpartition(".")[2]
        reason = f"{kind}: {reply.message}" if kind else reply.message
        extra = {TOO_LARGE: 1.0} if status == "timeout" or kind in NO_ROOM else {}
        return Trial(study.id, config, stage, status, reason=reason, extra=extra)

    def _mend(self, study: Study, reply: Reply) -> str:
        """Class of a failure; an error on a GPU may have broken the context of all that follow."""
        status = reply.status if reply.status != "raised" else classify(reply)
        if status == "run_error" and study.device != "cpu":
            self._worker.stop()
        return status


def classify(reply: Reply) -> str:
    """Tell whether the compiler refused the config, or running it failed."""
    if reply.error == "sage_plugin.errors.ConfigError":
        return "illegal"
    return "compile_error" if by_compiler(reply.error, reply.message) else "run_error"
