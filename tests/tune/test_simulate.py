"""The search finds what an exhaustive one would, on recorded runs, for a tenth of the launches."""

from __future__ import annotations

import dataclasses

import pytest

from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.tune.configs import simulate
from sage_plugin.tune.search.search import ErrorLimit, SearchLimits
from tests.cli import program
from tests.tune import landscapes

NAME = "sage:portable sm_89"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = (landscapes.write(folder / f"{i}", NAME, seed=i, noise=0.005) for i in range(3))
    return [study for run in runs for study in simulate.read(run)]


def test_the_best_is_found_for_a_tenth_of_the_launches(recorded):
    for study in recorded:
        found = simulate.simulate(study, simulate.request_of(), repeats=4)
        assert found.configs == len(landscapes.space_of(NAME)) > 100
        assert found.noise == pytest.approx(0.005, rel=1e-3)
        assert found.gain > 0.02
        assert found.regret <= 0.005
        assert found.within >= 0.85
        assert found.launches <= 0.1 * found.exhaustive
        assert found.tried < found.configs / 2


def test_noise_leads_the_search_of_a_large_space_astray_no_further(tmp_path):
    name = "fav3_sage:hopper sm_90"
    (study,) = simulate.read(landscapes.write(tmp_path / "run", name, seed=0, noise=0.01))
    found = simulate.simulate(study, simulate.request_of(), repeats=12)
    assert found.configs > 3000
    assert found.regret <= 0.005
    assert found.launches <= 0.01 * found.exhaustive
    assert found.false_wins == 0


def test_configs_that_are_alike_have_hardly_ever_a_winner(recorded):
    assert simulate.simulate(recorded[0], simulate.request_of(), repeats=25).false_wins < 0.02


def test_the_counter_of_launches_counts_each_timed_call(recorded):
    study = recorded[0]
    runner = simulate.SimulatedRunner(study.trials, study.times, 0.0, 0)
    valid = [t for t in study.trials.values() if t.status == "ok"][:4]
    timed = runner.screen(study.study, valid[1:], study.study.default)
    assert runner.launches == 4 * study.study.timer.screen_rounds
    ratios = [trial.extra["ratio"] for trial in timed]
    assert ratios == [pytest.approx(study.times[trial.config]) for trial in valid[1:]]


def test_limits_of_the_search_and_of_errors_are_kept(recorded):
    few = simulate.request_of(limits=SearchLimits(max_trials=9))
    assert simulate.simulate(recorded[0], few, repeats=2).tried == 9
    gains = []
    for ratio in (1.0, 100.0):
        request = simulate.request_of(error_limit=ErrorLimit(max_ratio=ratio))
        gains.append([simulate.simulate(one, request, repeats=1).gain for one in recorded])
    assert sum(gains[0]) < sum(gains[1]), "what is faster and less exact does not count"


def test_the_noise_of_a_sample_is_read_from_any_interval():
    time = dataclasses.replace(
        landscapes.trials_of(landscapes.space_of(NAME)[:1], 0, noise=0.01)[0].time
    )
    assert simulate._noise(time) == pytest.approx(0.01)
    many = dataclasses.replace(time, n=100, low_ms=1 - 0.00246, high_ms=1 + 0.00246)
    assert simulate._noise(many) == pytest.approx(0.01, rel=0.01)


def test_the_command_reads_run_folders_and_says_where_numbers_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "REPEATS", 2)
    folder = landscapes.write(tmp_path / "run", NAME, seed=0)
    result = program.sage("tune", "--simulate", folder, "--max-trials", "5")
    assert result.exit_code == 0, result.stderr
    assert "sage:portable" in result.stdout
    assert "drawn from recorded medians" in result.stdout
    missing = program.sage("tune", "--simulate", tmp_path)
    assert missing.exit_code == 2
    assert "run_metadata.json" in missing.stderr


def test_a_run_without_enough_valid_configs_is_refused(tmp_path):
    folder = landscapes.write(tmp_path / "run", NAME, seed=0)
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    (folder / "ledger.jsonl").write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(UsageError, match="--exhaustive"):
        simulate.read(folder)
    (folder / "run_metadata.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        simulate.read(folder / "ledger.jsonl")
