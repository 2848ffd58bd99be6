"""The real runner: every candidate in a child process, every way to fail turned into a trial."""

from __future__ import annotations

from pathlib import Path

from sage_plugin.kernels.build_error import by_compiler
from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.configs.trial import RaceJob, ScreenJob
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.run.worker import Job, Reply, WorkerProcess


class SubprocessRunner:
    """Runs trials in one lane.

    A child that dies may have been killed by something else (memory, an operator), so the same job
    gets one more child before its config is held to be at fault.
    """

    def __init__(self, *, timeout_s: float, log: Path | None = None) -> None:
        self._worker = WorkerProcess(
            timeout_s=timeout_s, log=log, preload="sage_plugin.tune.configs.trial"
        )

    def screen(self, study: Study, config: LaunchConfig, base: LaunchConfig | None) -> Trial:
        """Screen as `Runner` says."""
        reply = self._run(ScreenJob(study, config, base))
        if reply.status == "done":
            trial: Trial = reply.value
            return trial
        return self._failed(study, config, "screen", reply)

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        """Race as `Runner` says."""
        reply = self._run(RaceJob(study, race))
        if reply.status == "done":
            trials: tuple[Trial, ...] = reply.value
            return trials
        return tuple(self._failed(study, c, "final", reply) for c in race.configs)

    def close(self) -> None:
        """End the child."""
        self._worker.close()

    def _run(self, job: Job) -> Reply:
        reply = self._worker.run(job)
        return self._worker.run(job) if reply.status == "crashed" else reply

    def _failed(self, study: Study, config: LaunchConfig, stage: str, reply: Reply) -> Trial:
        status = reply.status if reply.status != "raised" else classify(reply)
        if status == "run_error" and study.device != "cpu":
            # An error on a GPU may have broken the context for all that follow.
            self._worker.stop()
        kind = reply.error.rpartition(".")[2]
        reason = f"{kind}: {reply.message}" if kind else reply.message
        return Trial(study.id, config, stage, status, reason=reason)


def classify(reply: Reply) -> str:
    """Tell whether the compiler refused the config, or running it failed."""
    if reply.error == "sage_plugin.errors.ConfigError":
        return "illegal"
    return "compile_error" if by_compiler(reply.error, reply.message) else "run_error"
