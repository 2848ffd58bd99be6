"""The real runner: every candidate in a child process, every way to fail turned into a trial."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sage_plugin.kernels.build_error import by_compiler
from sage_plugin.schema import AnyLaunch, Trial
from sage_plugin.tune.configs.compile_pool import CompilePool
from sage_plugin.tune.configs.trial import JudgeJob, RaceJob, ScreenJob
from sage_plugin.tune.run.runner import Race, Resources
from sage_plugin.tune.run.study import Problem, Study
from sage_plugin.tune.run.worker import Job, Reply, WorkerProcess
from sage_plugin.tune.search.search import TOO_LARGE

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
NO_ROOM = ("OutOfResources", "OutOfMemoryError")
"""Classes of exceptions that say that a config takes more than there is."""


class SubprocessRunner:
    """Runs trials in one lane.

    A child that dies may have been killed by something else (memory, an operator), so the same job
    gets one more child before its config is held to be at fault.

    Args:
        timeout_s: longest that one job may take.
        log: where the child's output goes.
        pool: compiles ahead of the lanes that share it; closed with the first of them.
        gpu: UUID of the one GPU that the child sees; `None` for all. Lanes of any command take
            turns on a GPU of a UUID, so that nothing is timed beside something else.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        log: Path | None = None,
        pool: CompilePool | None = None,
        gpu: str | None = None,
    ) -> None:
        self._pool, self._gpu = pool, gpu
        self._worker = WorkerProcess(
            timeout_s=timeout_s,
            log=log,
            preload="sage_plugin.tune.configs.trial",
            environment={} if gpu is None else dict.fromkeys(VISIBLE, gpu),
        )

    def prepare(self, study: Study, configs: Sequence[AnyLaunch]) -> Mapping[AnyLaunch, Resources]:
        """Take note as `Runner` says."""
        if self._pool is None:
            return {}
        self._pool.submit(study.problem, configs)
        return self._pool.known(study.problem)

    def judge(self, study: Study, config: AnyLaunch) -> Trial:
        """Judge as `Runner` says; what a compile process refuses never reaches the device."""
        resources = Resources()
        if self._pool is not None:
            compiled = self._pool.reply(study.problem, config)
            refused = compiled.status == "raised" and classify(compiled) == "compile_error"
            if refused or compiled.status == "timeout":
                return self._failed(study, config, "screen", compiled)
            if compiled.status == "done":  # else it is the process that failed: the lane tries
                resources = compiled.value
        limit, needed = study.facts.smem_bytes, resources.smem_bytes or 0
        if limit and needed > limit:
            reason = f"needs {needed} bytes of shared memory, {study.facts.name} has {limit}"
            too_large = Reply("raised", error=f"triton.{NO_ROOM[0]}", message=reason)
            return _with(self._failed(study, config, "screen", too_large), resources)
        reply = self._run(JudgeJob(self._problem(study), config))
        if reply.status == "done":
            return _with(reply.value, resources)
        return _with(self._failed(study, config, "screen", reply), resources)

    def screen(
        self, study: Study, judged: Sequence[Trial], base: AnyLaunch | None
    ) -> tuple[Trial, ...]:
        """Screen as `Runner` says; where a batch breaks, each of it is timed alone."""
        reply = self._run(ScreenJob(self._problem(study), tuple(judged), base))
        if reply.status == "done":
            trials: tuple[Trial, ...] = reply.value
            return trials
        if len(judged) == 1:
            return (self._failed(study, judged[0].config, "screen", reply),)
        self._mend(study, reply)
        return tuple(trial for one in judged for trial in self.screen(study, [one], base))

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        """Race as `Runner` says."""
        reply = self._run(RaceJob(self._problem(study), race))
        if reply.status == "done":
            trials: tuple[Trial, ...] = reply.value
            return trials
        return tuple(self._failed(study, c, "final", reply) for c in race.configs)

    def cancel(self) -> None:
        """End the child; who waits for it hears of Ctrl-C."""
        if self._pool is not None:
            self._pool.cancel()
        self._worker.cancel()

    def close(self) -> None:
        """End the child."""
        if self._pool is not None:
            self._pool.close()
        self._worker.close()

    def _problem(self, study: Study) -> Problem:
        """What the child is given: a child that sees one GPU knows it as the first."""
        problem = study.problem
        return problem if self._gpu is None else dataclasses.replace(problem, device="cuda:0")

    def _run(self, job: Job) -> Reply:
        with _alone_on(self._gpu):
            reply = self._worker.run(job)
            return self._worker.run(job) if reply.status == "crashed" else reply

    def _failed(self, study: Study, config: AnyLaunch, stage: str, reply: Reply) -> Trial:
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


@contextlib.contextmanager
def _alone_on(gpu: str | None) -> Iterator[None]:
    """Wait until no other lane, of this command or another, works on a GPU."""
    if gpu is None:
        yield
        return
    import filelock

    name = re.sub(r"[^\w-]", "-", gpu)
    with filelock.FileLock(Path(tempfile.gettempdir()) / f"sage-plugin-{name}.lock", mode=0o666):
        yield


def _with(trial: Trial, resources: Resources) -> Trial:
    """A trial with what the compiler says of its config."""
    if resources == Resources():
        return trial
    return dataclasses.replace(
        trial,
        registers=resources.registers,
        spills=resources.spill_bytes,
        smem_bytes=resources.smem_bytes,
    )


def classify(reply: Reply) -> str:
    """Tell whether the compiler refused the config, or running it failed."""
    if reply.error == "sage_plugin.errors.ConfigError":
        return "illegal"
    return "compile_error" if by_compiler(reply.error, reply.message) else "run_error"
