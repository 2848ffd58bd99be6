"""A session ends: by its limits, by keys and signals, by whoever holds its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sage_plugin.errors import ConfigError, OutputError
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.crash_marker import CrashMarker
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.search.search import SearchLimits
from tests.tune import scripted
from tests.tune.scripted import ScriptedRunner, entries


def test_max_trials_and_patience_and_more_of_them_later(tmp_path):
    study = scripted.study(16)
    runner = ScriptedRunner()
    tune(scripted.plan(tmp_path, study, limits=SearchLimits(max_trials=5)), runner)
    assert len(runner.screened) == 5
    assert runner.screened[0] == study.default
    more = ScriptedRunner()
    tune(scripted.plan(tmp_path, study, limits=SearchLimits(max_trials=9)), more)
    assert len(more.screened) == 4
    patient = ScriptedRunner()
    plan = scripted.plan(tmp_path, study, limits=SearchLimits(patience=3), run_name="patient")
    tune(plan, patient)
    assert len(patient.screened) == 4


def test_a_spent_budget_still_tries_the_default_of_every_call(tmp_path):
    one, two = scripted.study(8), scripted.study(8, seq_q=2048)
    runner = ScriptedRunner()
    report = tune(scripted.plan(tmp_path, one, two, limits=SearchLimits(budget_s=1e-9)), runner)
    assert runner.screened == [one.default, two.default]
    assert [outcome.verdict for outcome in report.outcomes] == ["confirmed", "confirmed"]


def test_ctrl_c_leaves_loadable_output_and_the_rest_for_later(tmp_path):
    one, two = scripted.study(4), scripted.study(4, seq_q=2048)
    plan = scripted.plan(tmp_path, one, two)

    def press(count: int) -> None:
        if count == 6:
            raise KeyboardInterrupt

    runner = ScriptedRunner(before=press)
    report = tune(plan, runner)
    assert report.interrupted
    assert runner.closed
    assert [outcome.study.key for outcome in report.outcomes] == [one.key]
    assert [entry.key for entry in entries(plan)] == [one.key]
    results = json.loads((plan.run_folder / run_folder.RESULTS).read_text())
    assert (results["studies"], len(results["results"])) == (2, 1)
    (begun,) = report.unfinished
    assert begun.trials == {"ok": 1}
    assert results["unfinished"][0]["best"] == {"config": two.default.to_json(), "ratio": 1.0}
    rest = ScriptedRunner()
    assert not tune(plan, rest).interrupted
    assert len(rest.screened) == 3, "of a batch that was not timed each is judged again"
    assert len(entries(plan)) == 2


def test_a_damaged_registry_is_found_before_anything_runs(tmp_path):
    plan = scripted.plan(tmp_path)
    plan.registry_path.parent.mkdir(parents=True)
    plan.registry_path.write_text("{")
    runner = ScriptedRunner()
    with pytest.raises(ConfigError, match=r"attention\.json"):
        tune(plan, runner)
    assert runner.screened == []
    assert runner.closed


def test_a_place_that_cannot_be_written_is_found_before_anything_runs(tmp_path):
    plan = scripted.plan(tmp_path)
    plan.registry_path.parents[1].write_text("a file")
    runner = ScriptedRunner()
    with pytest.raises(OutputError):
        tune(plan, runner)
    assert runner.screened == []


def test_a_run_folder_has_one_holder_and_a_dead_one_is_taken_over(tmp_path, caplog):
    plan = scripted.plan(tmp_path)
    with (
        run_folder.claimed(plan.run_folder),
        pytest.raises(OutputError, match=f"in use by process {os.getpid()}"),
    ):
        tune(plan, ScriptedRunner())
    note = plan.run_folder / run_folder.HOLDER
    assert not note.exists()
    note.write_text('{"pid": 4242, "host": "elsewhere"}')
    tune(plan, ScriptedRunner())
    assert "taking over from process 4242 on elsewhere, which is gone" in caplog.text


KILLED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from sage_plugin.tune.configs.session import tune
    from tests.tune import scripted

    victim = scripted.study(6).space[3]

    class Deadly(scripted.ScriptedRunner):
        def judge(self, study, config):
            if config == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().judge(study, config)

    tune(scripted.plan(Path(sys.argv[1]), scripted.study(6)), Deadly())
""")


def test_a_trial_that_ends_the_session_runs_again_once(tmp_path):
    study = scripted.study(6)
    plan = scripted.plan(tmp_path, study)
    victim = study.space[3]
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    assert subprocess.run(command, env=env).returncode == -signal.SIGKILL
    ledger = plan.run_folder / run_folder.LEDGER
    done = len(Ledger(ledger).all())
    assert 1 <= done < 6
    note = plan.run_folder / run_folder.CRASH_MARKER
    assert CrashMarker(note).begin(study.id, victim), "what was running is tried once more"
    runner = ScriptedRunner()
    (outcome,) = tune(plan, runner).outcomes
    assert victim not in runner.screened, "and not a third time"
    assert len(runner.screened) == 5 - done
    assert outcome.trials == {"ok": 5, "passed_over": 1}
    rows = Ledger(ledger).trials(study.id, "screen")
    assert victim not in rows, "whoever ended the session, the config is no crasher"
    assert note.exists()
    anew = ScriptedRunner()
    (outcome,) = tune(scripted.plan(tmp_path, study, fresh=True), anew).outcomes
    assert outcome.trials == {"ok": 6}
    assert not note.exists()


def test_a_budget_ends_a_batch_between_two_candidates(tmp_path, monkeypatch):
    study, now = scripted.study(32), [0.0]
    monkeypatch.setattr("sage_plugin.tune.configs.study_search.time.monotonic", lambda: now[0])

    def wait(count: int) -> None:
        now[0] += 10.0

    limits = SearchLimits(budget_s=50.0)
    runner = ScriptedRunner(before=wait)
    (outcome,) = tune(scripted.plan(tmp_path, study, limits=limits), runner).outcomes
    assert outcome.trials == {"ok": len(runner.screened)}
    assert len(runner.screened) == 4, "35 seconds are the screen's"


def test_what_the_first_config_takes_to_start_and_compile_is_nobodys_share(tmp_path, monkeypatch):
    first, second, now = scripted.study(32), scripted.study(32, seq_q=2048), [0.0]
    monkeypatch.setattr("sage_plugin.tune.configs.study_search.time.monotonic", lambda: now[0])

    def wait(count: int) -> None:
        now[0] += 40.0 if count == 0 else 2.0

    plan = scripted.plan(tmp_path, first, second, limits=SearchLimits(budget_s=60.0))
    tried = [outcome.trials["ok"] for outcome in tune(plan, ScriptedRunner(before=wait)).outcomes]
    assert tried == [1 + 4, 1 + 4], "7 seconds are the screen's, of a half of what was left"


def test_ctrl_c_does_not_count_as_an_ended_session(tmp_path):
    study = scripted.study(3)
    plan = scripted.plan(tmp_path, study)

    def press(count: int) -> None:
        raise KeyboardInterrupt

    for _ in range(4):
        assert tune(plan, ScriptedRunner(before=press)).interrupted
    assert tune(plan, ScriptedRunner()).outcomes[0].trials == {"ok": 3}


def test_sigterm_ends_a_session_as_ctrl_c_does_and_brands_nothing(tmp_path):
    study = scripted.study(3)
    plan = scripted.plan(tmp_path, study)

    def end(count: int) -> None:
        if count == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    for _ in range(3):
        assert tune(plan, ScriptedRunner(before=end)).interrupted
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not (plan.run_folder / run_folder.CRASH_MARKER).exists()
    assert tune(plan, ScriptedRunner()).outcomes[0].trials == {"ok": 3}
