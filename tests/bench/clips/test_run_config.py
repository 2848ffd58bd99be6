"""The run configs, and what was predicted for each."""

from __future__ import annotations

from sage_plugin.bench.clips.run_config import RunConfig, mismatches, run_configs
from sage_plugin.plugin.policy.rules import Policy, PredictedRun, Prediction, Rule

RUNS = (PredictedRun("sdpa", 9.0, 0.0), PredictedRun("policy", 6.0, 0.25))
PREDICTION = Prediction("H100", 15, 60, RUNS)
POLICY = Policy(1, (Rule("sage"),), prediction=PREDICTION)


def test_the_baseline_first_each_kernel_once_and_the_policy_last():
    found = run_configs(("sage", "sdpa", "sage", "fav2"), POLICY)
    assert [c.name for c in found] == ["sdpa", "sage", "fav2", "policy"]
    assert [c.is_baseline for c in found] == [True, False, False, False]
    assert found[-1].policy is POLICY
    assert [c.name for c in run_configs(("sage",))] == ["sdpa", "sage"]


def test_a_baseline_of_another_name_leaves_sdpa_a_kernel():
    assert [(w.name, w.kernel) for w in run_configs(("sdpa",), baseline="unpatched")] == [
        ("unpatched", "sdpa"),
        ("sdpa", "sdpa"),
    ]


def test_what_was_predicted_for_a_run():
    host, sage, ours = (
        RunConfig("unpatched"),
        RunConfig("sage", "sage"),
        RunConfig("policy", policy=POLICY),
    )
    assert host.predicted(POLICY).ms == 9.0
    assert ours.predicted(POLICY).ms == 6.0
    assert sage.predicted(POLICY) is None
    assert host.predicted(None) is None


def test_runs_that_nobody_predicted():
    assert list(mismatches(None, device="H100", calls=8)) == []
    assert list(mismatches(PREDICTION, device="H100", calls=60)) == []
    assert len(list(mismatches(PREDICTION, device="H200", calls=8))) == 2
