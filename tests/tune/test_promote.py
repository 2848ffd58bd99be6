"""Noise is not promoted, a sure gain is."""

from __future__ import annotations

import dataclasses

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.configs import promote
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.search.search import Search
from tests.registry import samples
from tests.tune import scripted
from tests.tune.scripted import ScriptedRunner

STUDIES = {count: scripted.study(count) for count in (2, 6, 40)}


def screened(study, runner: ScriptedRunner) -> dict[LaunchConfig, Trial]:
    """Each config of a study, judged, and timed where it passes."""
    judged = [runner.judge(study, config) for config in study.space]
    passed = [trial for trial in judged if trial.status == "ok"]
    timed = runner.screen(study, passed, study.default) if passed else ()
    return {trial.config: trial for trial in (*judged, *timed)}


def verdict(count: int, runner: ScriptedRunner, *, min_gain: float) -> promote.StudyVerdict:
    """Search and race without files."""
    study = STUDIES[count]
    screens = screened(study, runner)
    race = Race(Search(study.space).finalists(screens), None, 1.0, min_gain=min_gain)
    finals = {t.config: t for t in runner.race(study, race)}
    return promote.decide(study, screens, finals, min_gain=min_gain, run="r")


def test_the_winner_of_many_equal_configs_is_the_default():
    seeds = 60
    kept = sum(
        verdict(40, ScriptedRunner(noise=0.02, seed=s), min_gain=0.01).kind == "confirmed"
        for s in range(seeds)
    )
    assert kept >= 0.98 * seeds


def test_a_config_equal_to_the_default_is_hardly_ever_promoted():
    seeds = 120
    kinds = [
        verdict(2, ScriptedRunner(noise=0.02, seed=s), min_gain=0.0).kind for s in range(seeds)
    ]
    assert kinds.count("tuned") < 0.02 * seeds


def test_a_real_gain_is_found_in_spite_of_noise_and_drift():
    best = STUDIES[6].space[4]
    for seed in range(20):
        runner = ScriptedRunner(
            lambda config: 0.93 if config == best else 1.0,
            noise=0.015,
            drift=lambda n: 1 + 0.02 * (n % 50) / 50,
            seed=seed,
        )
        found = verdict(6, runner, min_gain=0.01)
        assert (found.kind, found.entry.config) == ("tuned", best)
        assert 0.01 < found.entry.evidence.gain_low < 0.07


def decide(finals: dict[LaunchConfig, dict[str, float]], **keywords) -> promote.StudyVerdict:
    study = STUDIES[6]
    runner = ScriptedRunner()
    screens = screened(study, runner)
    raced = {}
    for config, extra in finals.items():
        trial = dataclasses.replace(screens[config], stage="final", extra=extra)
        raced[config] = dataclasses.replace(trial, time=samples.timing(extra.pop("ms", 1.0)))
    return promote.decide(study, screens, raced, **{"min_gain": 0.01, "run": "r", **keywords})


def test_a_gain_must_be_above_what_the_default_gains_over_itself():
    default, other = STUDIES[6].space[:2]
    noisy = {default: {"aa_ratio": 1.06}, other: {"gain_low": 0.05, "ms": 0.9}}
    assert decide(noisy).kind == "confirmed"
    assert decide(noisy).entry.evidence.stamp == "noisy"
    clean = {default: {"aa_ratio": 1.001}, other: {"gain_low": 0.05, "aa_ratio": 1.001, "ms": 0.9}}
    assert decide(clean).kind == "tuned"
    assert decide(clean).entry.evidence.stamp == "clean"


def test_throttling_is_told():
    default = STUDIES[6].default
    found = decide({default: {"aa_ratio": 1.0, "throttled": 1.0}})
    assert found.entry.evidence.stamp == "throttled"


def test_evidence_is_rounded_and_dated():
    default = STUDIES[6].default
    finished = {"aa_ratio": 1.0, "ms": 1.23456789, "finished_at": 1_790_000_000.0}
    evidence = decide({default: finished}).entry.evidence
    assert evidence.time.median_ms == 1.23457
    assert evidence.date == "2026-09-21"


def test_a_ledger_of_other_content_is_refused_in_one_sentence():
    study, runner = STUDIES[6], ScriptedRunner()
    screens = screened(study, runner)
    configs = Search(study.space).finalists(screens)
    finals = {t.config: t for t in runner.race(study, Race(configs, None, 1.0))}
    blank = {c: dataclasses.replace(trial, errors=None) for c, trial in screens.items()}
    with pytest.raises(ConfigError, match=r"holds no errors of it: .* tune again with --fresh"):
        promote.decide(study, blank, finals, min_gain=0.0, run="r")


def test_nothing_raced_is_a_failure_with_its_reasons():
    study = STUDIES[6]
    runner = ScriptedRunner(fails=dict.fromkeys(study.space, "crashed"))
    screens = screened(study, runner)
    found = promote.decide(study, screens, {}, min_gain=0.01, run="r")
    assert (found.kind, found.entry) == ("failed", None)
    assert found.reason == "6 crashed (crashed as the script says)"


@pytest.mark.parametrize("low", [float("-inf"), -0.1, 0.0, 0.01])
def test_no_lower_bound_up_to_the_least_gain_is_enough(low):
    default, other = STUDIES[6].space[:2]
    finals = {default: {"aa_ratio": 1.0}, other: {"gain_low": low, "ms": 0.5}}
    assert decide(finals).kind == "confirmed"
