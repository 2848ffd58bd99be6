"""Compile processes work ahead of a lane; what they refuse never reaches it."""

from __future__ import annotations

import threading

import pytest

from sage_plugin.tune.configs import compile_pool
from sage_plugin.tune.configs.compile_pool import CompilePool
from sage_plugin.tune.configs.subprocess_runner import SubprocessRunner
from sage_plugin.tune.run.runner import Resources
from sage_plugin.tune.run.worker import Reply
from sage_plugin.tune.search.search import TOO_LARGE
from tests.tune import jobs, scripted
from tests.tune.test_subprocess_runner import FakeLane


class Scripted:
    """Stands for a pool."""

    def __init__(self, reply: Reply) -> None:
        self.answer, self.submitted = reply, []

    def submit(self, problem, configs) -> None:
        self.submitted += configs

    def known(self, problem) -> dict:
        return dict.fromkeys(self.submitted, Resources(1, 2, 3))

    def reply(self, problem, config) -> Reply:
        return self.answer


REFUSED = Reply("raised", error="triton.compiler.errors.CompilationError", message="no")
NO_ROOM = Reply("raised", error="triton.runtime.errors.OutOfResources", message="smem")
TAKES = Resources(168, 16, 4096)


@pytest.mark.parametrize(
    ("reply", "status", "large", "judged"),
    [
        (REFUSED, "compile_error", False, False),
        (NO_ROOM, "compile_error", True, False),
        (Reply("timeout", message="ran longer"), "timeout", True, False),
        (Reply("crashed", message="killed"), "ok", False, True),
        (Reply("raised", error="builtins.ValueError", message="not ours"), "ok", False, True),
        (Reply("done", value=TAKES), "ok", False, True),
        (Reply("done", value=Resources(smem_bytes=10**9)), "compile_error", True, False),
    ],
)
def test_what_the_compiler_says_decides_what_reaches_the_lane(reply, status, large, judged):
    study = scripted.study(2)
    good = scripted.ScriptedRunner().judge(study, study.default)
    runner = SubprocessRunner(timeout_s=1, pool=Scripted(reply))
    runner._worker = FakeLane(Reply("done", value=good))
    trial = runner.judge(study, study.default)
    assert (trial.status, bool(trial.extra.get(TOO_LARGE))) == (status, large)
    assert (runner._worker.replies == []) == judged
    if reply.value == TAKES:
        assert (trial.registers, trial.spills, trial.smem_bytes) == (168, 16, 4096)
    assert runner.prepare(study, study.space) == dict.fromkeys(study.space, Resources(1, 2, 3))


@pytest.fixture
def pool(monkeypatch):
    made = CompilePool(2, timeout_s=60)
    yield made
    made.close()


def job_is(monkeypatch, make) -> None:
    monkeypatch.setattr(compile_pool, "CompileJob", make)


def test_each_config_is_compiled_once_in_a_process_that_sees_no_gpu(pool, monkeypatch):
    study, made = scripted.study(4), []
    job_is(
        monkeypatch,
        lambda problem, config: made.append(config) or jobs.Environment("CUDA_VISIBLE_DEVICES"),
    )
    pool.submit(study.problem, study.space[:3])
    pool.submit(study.problem, study.space)
    assert {pool.reply(study.problem, config).value for config in study.space} == {""}
    assert made == list(study.space)
    assert set(pool.known(study.problem)) == set(study.space)
    assert pool.known(scripted.study(4, seq_q=8).problem) == {}


def test_a_killed_compiler_costs_its_config_alone(pool, monkeypatch):
    study = scripted.study(3)
    bad = study.space[1]
    job_is(monkeypatch, lambda _, config: jobs.kill_itself if config == bad else jobs.answer)
    pool.submit(study.problem, study.space)
    replies = {config: pool.reply(study.problem, config) for config in study.space}
    assert {c: reply.status for c, reply in replies.items()} == {
        c: "crashed" if c == bad else "done" for c in study.space
    }
    assert bad not in pool.known(study.problem)


def test_cancel_ends_who_waits(pool, monkeypatch, tmp_path):
    study = scripted.study(4)
    job_is(monkeypatch, lambda *_: jobs.Hang(tmp_path / "pids"))
    threading.Timer(1.0, pool.cancel).start()
    pool.submit(study.problem, study.space)
    for config in reversed(study.space):  # the last is queued, and never begun
        with pytest.raises(KeyboardInterrupt):
            pool.reply(study.problem, config)
    assert pool.known(study.problem) == {}
    with pytest.raises(KeyboardInterrupt):
        pool.submit(study.problem, study.space)


def test_a_gpu_of_a_uuid_is_the_first_that_the_child_sees():
    study = scripted.study(2)
    runner = SubprocessRunner(timeout_s=60, gpu="GPU-1234")
    try:
        assert runner._problem(study).device == "cuda:0"
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            assert runner._worker.run(jobs.Environment(name)).value == "GPU-1234"
    finally:
        runner.close()
    assert SubprocessRunner(timeout_s=1)._problem(study) == study.problem
