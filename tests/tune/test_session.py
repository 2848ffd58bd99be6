"""A session finishes, resumes, refuses and survives; every device is scripted."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest

from sage_plugin.errors import TuningError
from sage_plugin.registry import lookup
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.observer import Observer
from sage_plugin.tune.search.search import BATCH, ErrorLimit, SearchLimits
from tests.registry import samples
from tests.tune import scripted
from tests.tune.scripted import ScriptedRunner, entries, faster


def test_a_faster_config_is_written_and_found_by_the_next_call(tmp_path):
    study = scripted.study()
    winner = study.space[5]
    plan = scripted.plan(tmp_path, study)
    report = tune(plan, ScriptedRunner(faster(winner), noise=0.005), argv=["sage", "tune"])
    (outcome,) = report.outcomes
    assert (outcome.verdict, outcome.written) == ("tuned", "added")
    found = lookup.find(study.key, facts=samples.FACTS, config_dir=tmp_path / "configs")
    assert found.entry == outcome.entry
    assert found.entry.config == winner
    evidence = found.entry.evidence
    assert 0.15 < evidence.gain_low < 0.2
    assert evidence.baseline == study.default.text()
    assert evidence.inputs == ("sha256:aa",)
    assert (evidence.run, evidence.stamp, evidence.synthetic) == ("run", "clean", False)
    assert outcome.trials == {"ok": 8}


def test_the_outputs_of_a_run_can_be_loaded(tmp_path):
    study = scripted.study()
    plan = scripted.plan(tmp_path, study)
    bad = study.space[3]
    tune(plan, ScriptedRunner(fails={bad: "timeout"}), argv=["sage", "tune", "--seed", "0"])
    metadata = json.loads((plan.run_folder / run_folder.METADATA).read_text())
    assert metadata["argv"] == ["sage", "tune", "--seed", "0"]
    assert metadata["device"]["slug"] == samples.FACTS.slug
    assert metadata["studies"][0]["id"] == study.id
    results = json.loads((plan.run_folder / run_folder.RESULTS).read_text())
    assert results["results"][0]["verdict"] == "confirmed"
    assert results["results"][0]["trials"] == {"ok": 7, "timeout": 1}
    with open(plan.run_folder / run_folder.TRIALS, newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert sum(row["stage"] == "screen" for row in rows) == 8
    (failed,) = [row for row in rows if row["status"] == "timeout"]
    assert failed["block_m"] == str(bad.block_m)
    assert failed["reason"] == "timeout as the script says"


def test_what_the_compiler_says_is_in_the_table(tmp_path):
    class Compiled(ScriptedRunner):
        def judge(self, study, config):
            trial = super().judge(study, config)
            return dataclasses.replace(trial, registers=168, spills=8, smem_bytes=4096)

    plan = scripted.plan(tmp_path, scripted.study(2))
    tune(plan, Compiled())
    with open(plan.run_folder / run_folder.TRIALS, newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["stage"] == "screen"]
    assert {(r["registers"], r["spills"], r["smem_bytes"]) for r in rows} == {("168", "8", "4096")}


@pytest.mark.parametrize("max_trials", [None, 3])
def test_what_opens_the_next_study_is_compiled_while_one_is_timed(tmp_path, max_trials):
    first, second = scripted.study(24), scripted.study(24, seq_q=2048)
    plan = scripted.plan(tmp_path, first, second, limits=SearchLimits(max_trials=max_trials))
    meanwhile = []

    def before(count: int) -> None:
        if count == 1:  # the first study is at its second config
            meanwhile.extend(c for study, cs in runner.prepared for c in cs if study == second.id)

    runner = ScriptedRunner(before=before)
    tune(plan, runner)
    assert len(meanwhile) == (max_trials or 1 + BATCH)
    assert set(meanwhile) <= set(runner.screened[len(runner.screened) // 2 :])


def test_a_default_that_nothing_beats_is_confirmed(tmp_path):
    plan = scripted.plan(tmp_path)
    report = tune(plan, ScriptedRunner(noise=0.01))
    assert report.outcomes[0].verdict == "confirmed"
    (entry,) = entries(plan)
    assert entry.config == plan.studies[0].default
    assert entry.evidence.confirmed
    assert entry.evidence.gain_low == 0.0


def test_a_gain_below_the_least_gain_is_not_worth_an_entry(tmp_path):
    study = scripted.study()
    speed = faster(study.space[1], by=0.02)
    small = tune(scripted.plan(tmp_path, study, min_gain=0.05), ScriptedRunner(speed))
    assert small.outcomes[0].verdict == "confirmed"
    again = scripted.plan(tmp_path, study, min_gain=0.01)
    runner = ScriptedRunner(speed)
    enough = tune(again, runner)
    assert enough.outcomes[0].verdict == "tuned"
    assert runner.screened == [], "another threshold needs no new screen"
    assert len(runner.raced) == 1, "who cannot win much left the race early"
    higher = ScriptedRunner(speed)
    last = tune(scripted.plan(tmp_path, study, min_gain=0.03), higher)
    assert last.outcomes[0].verdict == "confirmed"
    assert higher.raced == []


def test_the_same_command_resumes_and_changes_nothing(tmp_path):
    study = scripted.study()
    plan = scripted.plan(tmp_path, study)
    first = tune(plan, ScriptedRunner(faster(study.space[2]), noise=0.01))
    before = plan.registry_path.read_bytes()
    runner = ScriptedRunner()
    second = tune(plan, runner)
    assert (runner.screened, runner.raced) == ([], [])
    assert second.outcomes[0].entry == first.outcomes[0].entry
    assert second.outcomes[0].written == "kept: already there"
    assert plan.registry_path.read_bytes() == before


def test_fresh_starts_over_and_keeps_the_old_ledger(tmp_path):
    study = scripted.study()
    tune(scripted.plan(tmp_path, study), ScriptedRunner())
    runner = ScriptedRunner()
    plan = scripted.plan(tmp_path, study, fresh=True)
    tune(plan, runner)
    assert len(runner.screened) == 8
    assert len(list(plan.run_folder.glob("ledger.*.jsonl"))) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seq_q": 2048},
        {"seq_k": 2048},
        {"batch_heads": 32},
        {"head_dim": 128},
        {"causal": True},
        {"dtype": "float16"},
        {"layout": "bshd"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_keys_that_differ_in_one_field_are_two_studies_and_two_entries(tmp_path, change):
    one, two = scripted.study(4), scripted.study(4, **change)
    assert one.id != two.id
    plan = scripted.plan(tmp_path, one, two)
    runner = ScriptedRunner()
    tune(plan, runner)
    assert len(runner.screened) == 8
    assert len(entries(plan)) == 2
    ledger = Ledger(plan.run_folder / run_folder.LEDGER)
    assert len(ledger.trials(one.id, "screen")) == len(ledger.trials(two.id, "screen")) == 4


def test_failed_candidates_are_rows_and_the_run_goes_on(tmp_path):
    study = scripted.study(10)
    statuses = ("gate_failed", "compile_error", "run_error", "crashed", "timeout", "mutates_input")
    fails = dict(zip(study.space[1:], statuses, strict=False))
    plan = scripted.plan(tmp_path, study)
    (outcome,) = tune(plan, ScriptedRunner(faster(study.space[9]), fails=fails)).outcomes
    assert outcome.trials == {"ok": 4, **dict.fromkeys(statuses, 1)}
    assert outcome.entry.config == study.space[9]
    rows = Ledger(plan.run_folder / run_folder.LEDGER).trials(study.id, "screen")
    assert {rows[config].status for config in fails} == set(statuses)
    assert all(rows[config].reason for config in fails)


def test_what_was_tried_before_the_end_of_the_world_is_used_on_restart(tmp_path):
    study = scripted.study(64)
    plan = scripted.plan(tmp_path, study, limits=SearchLimits(exhaustive=True))

    def break_down(count: int) -> None:
        if count == 56:
            raise SystemError("trial 57")

    broken = ScriptedRunner(before=break_down)
    with pytest.raises(SystemError, match="57"):
        tune(plan, broken)
    assert broken.closed
    ledger = Ledger(plan.run_folder / run_folder.LEDGER)
    kept = ledger.trials(study.id, "screen")
    assert 48 < len(kept) <= 56, "all but the batch that was judged and not timed"
    with open(plan.run_folder / run_folder.TRIALS, newline="") as stream:
        assert len(list(csv.DictReader(stream))) == len(kept)
    runner = ScriptedRunner()
    tune(plan, runner)
    assert len(runner.screened) == 64 - len(kept)
    assert not set(runner.screened) & set(kept)


def test_all_failing_is_an_error_with_classes_and_counts(tmp_path):
    study = scripted.study(5)
    fails = dict.fromkeys(study.space, "gate_failed") | {study.space[4]: "crashed"}
    plan = scripted.plan(tmp_path, study)
    with pytest.raises(TuningError) as caught:
        tune(plan, ScriptedRunner(fails=fails))
    assert caught.value.exit_code == 1
    assert "4 gate_failed (gate_failed as the script says)" in str(caught.value)
    assert "1 crashed" in str(caught.value)
    assert "registry is unchanged" in str(caught.value)
    assert not plan.registry_path.exists()


def test_some_failing_keys_do_not_take_the_others_with_them(tmp_path):
    good, bad = scripted.study(4), scripted.study(scripted.space(8)[4:], seq_q=2048)
    plan = scripted.plan(tmp_path, bad, good)
    report = tune(plan, ScriptedRunner(fails=dict.fromkeys(bad.space, "gate_failed")))
    assert [outcome.verdict for outcome in report.outcomes] == ["failed", "confirmed"]
    assert report.failed == report.outcomes[:1]
    assert "4 gate_failed" in report.outcomes[0].notes[0]
    assert [entry.key for entry in entries(plan)] == [good.key]


def test_a_default_that_fails_its_gate_is_replaced_by_the_fastest_that_passes(tmp_path):
    study = scripted.study(4)
    runner = ScriptedRunner(
        lambda c: 1 + study.space.index(c), fails={study.default: "gate_failed"}
    )
    (outcome,) = tune(scripted.plan(tmp_path, study), runner).outcomes
    assert (outcome.verdict, outcome.entry.config) == ("tuned", study.space[1])
    assert outcome.entry.evidence.baseline.startswith("unusable")


def test_a_clock_ramp_does_not_favor_those_who_come_late(tmp_path):
    configs = scripted.space(16)
    winner = configs[7]
    for name, listed in (("forward", configs), ("backward", (configs[0], *configs[:0:-1]))):
        study = scripted.study(listed)
        plan = scripted.plan(tmp_path / name, study)
        runner = ScriptedRunner(
            faster(winner, by=0.05), noise=0.004, drift=lambda n: 1.3 - 0.3 * min(1, n / 300)
        )
        assert tune(plan, runner).outcomes[0].entry.config == winner


def test_what_was_measured_is_what_is_reported_and_written(tmp_path):
    study = scripted.study()
    plan = scripted.plan(tmp_path, study)
    foreign = samples.entry(study.key, samples.config(block_m=1024, num_warps=3))

    class Neighbor(Observer):
        def race_started(self, study, finalists):
            samples.merged(plan.registry_path, foreign)

    report = tune(plan, ScriptedRunner(faster(study.space[2])), Neighbor())
    assert report.outcomes[0].entry.config == study.space[2]
    assert [entry.config for entry in entries(plan)] == [study.space[2]]


def test_an_entry_that_cannot_run_here_is_never_tried(tmp_path):
    study = scripted.study()
    foreign = samples.config(block_m=1024, num_warps=3)
    runner = ScriptedRunner()
    tune(held(tmp_path, study, foreign), runner)
    assert foreign not in runner.screened


def held(tmp_path, study, config):
    """A plan whose registry holds a config for the study's key."""
    plan = scripted.plan(tmp_path, study)
    samples.merged(plan.registry_path, samples.entry(study.key, config))
    return plan


def test_what_the_registry_holds_is_raced_and_stays_where_nothing_is_surely_faster(tmp_path):
    study = scripted.study(12)
    incumbent, rival = study.space[9], study.space[4]
    plan = held(tmp_path, study, incumbent)
    speed = {incumbent: 0.800, rival: 0.798}
    runner = ScriptedRunner(lambda config: speed.get(config, 1.0), noise=0.01)
    (outcome,) = tune(plan, runner).outcomes
    assert runner.screened[1] == incumbent
    assert incumbent in runner.raced[0]
    assert outcome.entry.config == incumbent


@pytest.mark.parametrize(
    "limits", [SearchLimits(max_trials=1), SearchLimits(budget_s=1e-9)], ids=str
)
def test_what_the_registry_holds_is_measured_however_short_the_search(tmp_path, limits):
    study = scripted.study(12)
    incumbent = study.space[9]
    held(tmp_path, study, incumbent)
    plan = scripted.plan(tmp_path, study, limits=limits)
    runner = ScriptedRunner(faster(incumbent), noise=0.005)
    (outcome,) = tune(plan, runner).outcomes
    assert runner.screened == [study.default, incumbent]
    assert outcome.entry.config == incumbent
    assert entries(plan)[0].config == incumbent


@pytest.mark.parametrize(
    ("status", "again"), [("timeout", 1), ("run_error", 1), ("compile_error", 0)]
)
def test_a_failure_that_may_have_had_another_cause_is_tried_again(tmp_path, status, again):
    study = scripted.study(4)
    failed = study.space[2]
    plan = scripted.plan(tmp_path, study)
    tune(plan, ScriptedRunner(fails={failed: status}))
    later = ScriptedRunner()
    tune(plan, later)
    assert later.screened == [failed] * again


def test_a_held_config_that_lost_its_advantage_is_demoted(tmp_path):
    study = scripted.study()
    plan = held(tmp_path, study, study.space[3])
    slow = ScriptedRunner(lambda config: 1.2 if config == study.space[3] else 1.0, noise=0.005)
    (outcome,) = tune(plan, slow).outcomes
    assert (outcome.verdict, outcome.written) == ("confirmed", "replaced")
    assert entries(plan)[0].config == study.default


def test_synthetic_inputs_never_replace_captures(tmp_path):
    study = scripted.study(synthetic=True)
    plan = held(tmp_path, study, study.space[3])
    (outcome,) = tune(plan, ScriptedRunner(faster(study.space[1]))).outcomes
    assert outcome.written.startswith("kept: an entry tuned on captures")
    assert entries(plan)[0].config == study.space[3]


def test_a_race_that_dies_is_run_in_pairs(tmp_path):
    study = scripted.study(4)
    killer, winner = study.space[1], study.space[2]
    runner = ScriptedRunner(faster(winner, killer), fails_in_race={killer: "crashed"}, noise=0.004)
    plan = scripted.plan(tmp_path, study)
    (outcome,) = tune(plan, runner).outcomes
    assert (outcome.verdict, outcome.entry.config) == ("tuned", winner)
    finals = Ledger(plan.run_folder / run_folder.LEDGER).trials(study.id, "final")
    assert finals[killer].status == "crashed"
    assert all(finals[c].status == "ok" for c in finals if c != killer)


def test_a_single_challenger_that_kills_the_race_leaves_the_default(tmp_path):
    study = scripted.study(2)
    runner = ScriptedRunner(
        faster(study.space[1]), fails_in_race={study.space[1]: "timeout"}, noise=0.004
    )
    (outcome,) = tune(scripted.plan(tmp_path, study), runner).outcomes
    assert (outcome.verdict, outcome.entry.config) == ("confirmed", study.default)
    assert runner.raced[-1] == (study.default,)


def test_a_noisy_or_throttled_result_replaces_nothing(tmp_path):
    study = scripted.study()
    plan = held(tmp_path, study, study.space[3])

    class Throttled(ScriptedRunner):
        def race(self, study, race):
            finals = super().race(study, race)
            return tuple(
                dataclasses.replace(one, extra=one.extra | {"throttled": 1.0}) for one in finals
            )

    slow = Throttled(lambda config: 1.2 if config == study.space[3] else 1.0, noise=0.005)
    (outcome,) = tune(plan, slow).outcomes
    assert outcome.verdict == "confirmed"
    assert outcome.written.startswith("kept: its times are throttled")
    assert entries(plan)[0].config == study.space[3]
    fresh = scripted.plan(tmp_path / "new", study)
    (first,) = tune(fresh, Throttled(noise=0.005)).outcomes
    assert first.written == "added", "where nothing is held, something is better than nothing"


def inexact(*configs):
    """Errors that are half as large again for some configs."""
    return lambda config: dataclasses.replace(
        samples.ERRORS,
        centred_rel_l1=samples.ERRORS.centred_rel_l1 * (1.5 if config in configs else 1.0),
    )


def test_speed_is_not_bought_with_errors_and_the_front_says_what_it_would_buy(tmp_path):
    study = scripted.study()
    fast, sound = study.space[4], study.space[5]
    speed = {fast: 0.5, sound: 0.9}
    runner = ScriptedRunner(lambda c: speed.get(c, 1.0), noise=0.002, errors=inexact(fast))
    plan = scripted.plan(tmp_path, study)
    (outcome,) = tune(plan, runner).outcomes
    assert outcome.entry.config == sound
    assert outcome.trials == {"ok": 7, "inexact": 1}
    assert [(p.config, p.allowed) for p in outcome.front] == [(fast, False), (sound, True)]
    results = json.loads((plan.run_folder / run_folder.RESULTS).read_text())
    assert [p["allowed"] for p in results["results"][0]["front"]] == [False, True]
    loose = scripted.plan(tmp_path, study, error_limit=ErrorLimit(max_ratio=2.0))
    again = ScriptedRunner(lambda c: speed.get(c, 1.0), noise=0.002)
    assert tune(loose, again).outcomes[0].entry.config == fast
    assert again.screened == [], "another limit needs no new screen"


def test_what_cannot_fit_is_not_tried_and_is_counted(tmp_path):
    sizes = [(m, n, s) for m in (16, 32, 64, 128) for n in (32, 64, 128) for s in (1, 2, 3)]
    space = [samples.config(block_m=m, block_n=n, num_stages=s) for m, n, s in sizes]
    study = scripted.study(tuple(space))
    fails = {config: "compile_error" for config in space if config.block_m >= 32}
    runner = ScriptedRunner(fails=fails, too_large=("compile_error",))
    limits = SearchLimits(exhaustive=True)
    (outcome,) = tune(scripted.plan(tmp_path, study, limits=limits), runner).outcomes
    assert outcome.trials["ok"] == 9
    assert outcome.trials["skipped"] == len(space) - len(runner.screened) > 0


def test_a_ratio_without_a_usable_default_is_paired_with_the_first_valid_config(tmp_path):
    study = scripted.study(12)
    drifting = ScriptedRunner(
        lambda c: 0.9 if c == study.space[7] else 1.0,
        fails={study.default: "gate_failed"},
        drift=lambda n: 1 + n / 20,
    )
    (outcome,) = tune(scripted.plan(tmp_path, study), drifting).outcomes
    assert outcome.entry.config == study.space[7]
    bases = {base for base, _ in drifting.batches}
    assert len(bases) == 1
    assert study.default not in bases
