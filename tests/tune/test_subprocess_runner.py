"""The real runner with real children, and a whole session through it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.registry import lookup
from sage_plugin.tune.configs import subprocess_runner
from sage_plugin.tune.configs.inputs import from_captures
from sage_plugin.tune.configs.plan import TuningRequest, build
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.configs.subprocess_runner import SubprocessRunner, classify
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.run.study import Timer
from sage_plugin.tune.run.worker import Reply, WorkerProcess
from tests.tune import captures, jobs, scripted
from tests.tune.captures import GROUPED, SELF

FAST = Timer("wall", screen_rounds=2, screen_s=0.02, race_rounds=6, race_s=0.2)


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (Reply("raised", error="triton.runtime.errors.OutOfResources"), "compile_error"),
        (Reply("raised", error="triton.compiler.errors.CompilationError"), "compile_error"),
        (Reply("raised", error="RuntimeError", message="PassManager::run failed"), "compile_error"),
        (Reply("raised", error="RuntimeError", message="illegal memory access"), "run_error"),
        (Reply("raised", error="torch.OutOfMemoryError", message="CUDA"), "run_error"),
        (Reply("raised", error=f"{ConfigError.__module__}.ConfigError"), "illegal"),
    ],
)
def test_exceptions_are_told_apart(reply, status):
    assert classify(reply) == status


class FakeLane:
    """Replies in order."""

    def __init__(self, *replies: Reply) -> None:
        self.replies, self.stops = list(replies), 0

    def run(self, job) -> Reply:
        return self.replies.pop(0)

    def stop(self) -> None:
        self.stops += 1


def runner(*replies: Reply) -> tuple[SubprocessRunner, FakeLane]:
    made = SubprocessRunner(timeout_s=1)
    made._worker = FakeLane(*replies)
    return made, made._worker


def test_a_job_whose_child_died_gets_one_more_child():
    study = scripted.study(2)
    good = scripted.ScriptedRunner().judge(study, study.default)
    crash, done = Reply("crashed", message="ended by SIGKILL"), Reply("done", value=good)
    made, _ = runner(crash, done)
    assert made.judge(study, study.default) == good
    made, lane = runner(crash, crash, done)
    assert made.judge(study, study.default).status == "crashed"
    assert lane.replies == [done]
    made, lane = runner(Reply("timeout", message="ran longer than 1 s"), done)
    assert made.judge(study, study.default).status == "timeout"
    assert lane.replies == [done], "what hangs once is not waited for twice"


def test_a_gpu_that_failed_to_run_gets_a_new_process_and_a_compile_error_does_not():
    study = scripted.study(2)
    made, lane = runner(
        Reply("raised", error="builtins.RuntimeError", message="illegal memory access")
    )
    found = made.judge(study, study.default)
    assert (found.status, found.reason) == ("run_error", "RuntimeError: illegal memory access")
    assert lane.stops == 1
    made, lane = runner(Reply("raised", error="triton.OutOfResources", message="smem"))
    assert made.judge(study, study.default).status == "compile_error"
    assert lane.stops == 0


def test_a_failed_race_is_a_failed_trial_for_each():
    study = scripted.study(3)
    made, _ = runner(Reply("timeout", message="ran longer"))
    finals = made.race(study, Race(study.space, None, 1.0))
    assert [(f.stage, f.status) for f in finals] == [("final", "timeout")] * 3


@pytest.fixture
def folder(tmp_path) -> Path:
    return captures.write(tmp_path / "c", [(SELF, (0, 1)), (GROUPED, (0,))])


def test_a_session_with_real_children_writes_what_the_runtime_finds(tmp_path, folder):
    request = TuningRequest(
        from_captures(folder),
        device="cpu",
        timer=FAST,
        config_dir=tmp_path / "configs",
        runs_dir=tmp_path / "runs",
    )
    plan = build(request)
    report = tune(plan, SubprocessRunner(timeout_s=120, log=plan.run_folder / "worker.log"))
    assert len(report.outcomes) == 2
    for outcome in report.outcomes:
        assert outcome.trials == {"ok": len(outcome.study.space)}
        match = lookup.find(outcome.study.key, facts=plan.facts, config_dir=tmp_path / "configs")
        assert match.entry == outcome.entry
        assert match.source == "exact"
    assert "timed on the saved part" in " ".join(report.outcomes[0].notes)
    assert "timed on the saved part" in " ".join(report.outcomes[1].notes)


def test_a_real_child_killed_in_the_middle_costs_nothing_but_time(tmp_path, monkeypatch):
    """The job kills its child once; the runner's second child answers."""
    monkeypatch.setattr(subprocess_runner, "JudgeJob", lambda *_: jobs.DieOnce(tmp_path / "died"))
    made = SubprocessRunner(timeout_s=60)
    made._worker = WorkerProcess(timeout_s=60)
    study = scripted.study(2)
    try:
        assert made.judge(study, study.default) == "survived"
        assert made._worker.started == 2
    finally:
        made.close()


def test_a_real_hang_is_a_timeout_and_the_next_trial_runs(tmp_path, monkeypatch):
    hang = jobs.Hang(tmp_path / "pids")
    made = SubprocessRunner(timeout_s=1.0)
    made._worker = WorkerProcess(timeout_s=1.0)
    study = scripted.study(2)
    try:
        monkeypatch.setattr(subprocess_runner, "JudgeJob", lambda *_: hang)
        found = made.judge(study, study.default)
        assert found.status == "timeout"
        assert "longer than 1 s" in found.reason
        monkeypatch.setattr(subprocess_runner, "JudgeJob", lambda *_: jobs.answer)
        assert made.judge(study, study.default) == 42
    finally:
        made.close()


def test_an_outside_kill_of_the_real_child_is_survived(tmp_path, monkeypatch):
    note = tmp_path / "pids"
    made = SubprocessRunner(timeout_s=20)
    made._worker = WorkerProcess(timeout_s=20)
    monkeypatch.setattr(subprocess_runner, "JudgeJob", lambda *_: jobs.Hang(note))

    def kill() -> None:
        for _ in range(2):
            while not note.exists() or not note.read_text():
                time.sleep(0.02)
            child, grandchild = map(int, note.read_text().split())
            note.unlink()
            os.kill(grandchild, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    study = scripted.study(2)
    found = made.judge(study, study.default)
    killer.join()
    made.close()
    assert found.status == "crashed"
    assert "SIGKILL" in found.reason
