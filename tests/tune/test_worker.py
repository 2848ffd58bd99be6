"""The lane survives whatever a job does to its process; these tests use real child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sage_plugin.errors import TuningError
from sage_plugin.tune.run import worker
from sage_plugin.tune.run.worker import WorkerProcess
from tests.tune import jobs


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that its parent has not read does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def gone(pid: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture
def lane():
    with WorkerProcess(timeout_s=60) as lane:
        yield lane


def test_six_ways_to_fail_and_the_lane_goes_on(lane):
    expected = [
        (jobs.raise_value_error, "raised", "ValueError", "not what it seems"),
        (jobs.raise_runtime_error, "raised", "RuntimeError", "illegal memory access"),
        (jobs.raise_out_of_resources, "raised", "OutOfResources", "required 1180000"),
        (jobs.segfault, "crashed", "", "SIGSEGV"),
        (jobs.kill_itself, "crashed", "", "SIGKILL"),
        (jobs.exit_one, "crashed", "", "code 1"),
    ]
    children = []
    for job, status, error, message in expected:
        reply = lane.run(job)
        assert (reply.status, reply.error.rpartition(".")[2]) == (status, error)
        assert message in reply.message
        again = lane.run(jobs.pid)
        assert again.status == "done"
        children.append(again.value)
    assert len(set(children[:3])) == 1, "an exception costs no child"
    assert len(set(children)) == 4, "each death costs one"
    assert lane.started == 4


def test_a_child_killed_from_outside_in_the_middle_of_a_job(lane, tmp_path):
    note = tmp_path / "pids"

    def kill() -> None:
        while not note.exists() or not note.read_text():
            time.sleep(0.02)
        os.kill(lane.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    reply = lane.run(jobs.Hang(note))
    killer.join()
    assert (reply.status, "SIGKILL" in reply.message) == ("crashed", True)
    assert lane.run(jobs.answer).value == 42
    os.kill(int(note.read_text().split()[1]), signal.SIGKILL)


def test_a_hung_jobs_process_tree_is_gone_before_the_next_job(tmp_path):
    note = tmp_path / "pids"
    with WorkerProcess(timeout_s=2.0) as lane:
        lane.run(jobs.answer)
        reply = lane.run(jobs.Hang(note))
        child, grandchild = map(int, note.read_text().split())
        assert reply.status == "timeout"
        assert "2 s" in reply.message
        assert not alive(child)
        assert gone(grandchild), "what the job started is ended too"
        assert lane.run(jobs.answer).value == 42


def test_a_child_is_replaced_after_some_jobs():
    with WorkerProcess(timeout_s=60, jobs_per_child=2) as lane:
        pids = [lane.run(jobs.pid).value for _ in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
    assert all(gone(pid) for pid in pids)


def test_output_goes_to_the_log_and_the_job_stands_in_a_folder_of_its_own(tmp_path, capfd):
    log = tmp_path / "worker.log"
    with WorkerProcess(timeout_s=60, log=log) as lane:
        folder = Path(lane.run(jobs.say_hello).value)
        assert folder.name.startswith("sage-tune-")
        assert folder.is_dir()
    assert not folder.exists()
    assert "hello on stderr" in log.read_text()
    out, err = capfd.readouterr()
    assert "hello" not in out + err


def test_the_child_dies_with_its_parent(tmp_path):
    note = tmp_path / "pids"
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from sage_plugin.tune.run.worker import WorkerProcess
        from tests.tune import jobs

        if __name__ == "__main__":
            WorkerProcess(timeout_s=600).run(jobs.Hang(Path({str(note)!r})))
        """)
    )
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    env["TMPDIR"] = str(tmp_path)
    parent = subprocess.Popen([sys.executable, str(script)], env=env)
    while not note.exists() or not note.read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    child, grandchild = map(int, note.read_text().split())
    parent.kill()
    parent.wait()
    assert gone(child)
    assert gone(grandchild)
    assert not list(tmp_path.glob("sage-tune-*"))


def test_a_child_that_cannot_start_is_an_error(tmp_path):
    with (
        WorkerProcess(timeout_s=60, preload="no_such_module_anywhere") as lane,
        pytest.raises(TuningError, match="exited with code 1"),
    ):
        lane.run(jobs.answer)


def test_what_is_interrupted_does_not_run_on(lane, monkeypatch):
    lane.run(jobs.answer)
    child = lane.pid

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lane.run(jobs.answer)
    assert not alive(child)
