"""The ways of running, and what was foreseen for each."""

from __future__ import annotations

from sage_plugin.bench.clips.prediction import foreseen_saving, mismatches
from sage_plugin.bench.clips.run_config import Way, ways
from sage_plugin.plugin.policy.rules import Foreseen, Policy, Prediction, Rule

FORESEEN = Prediction("H100", 15, 60, (Foreseen("sdpa", 9.0, 0.0), Foreseen("policy", 6.0, 0.25)))
POLICY = Policy(1, (Rule("sage"),), prediction=FORESEEN)


def test_the_host_first_each_kernel_once_and_the_policy_last():
    found = ways(("sage", "sdpa", "sage", "fav2"), POLICY)
    assert [way.name for way in found] == ["sdpa", "sage", "fav2", "policy"]
    assert [way.of_the_host for way in found] == [True, False, False, False]
    assert found[-1].policy is POLICY
    assert [way.name for way in ways(("sage",))] == ["sdpa", "sage"]


def test_a_host_of_another_name_leaves_sdpa_a_kernel():
    assert [(w.name, w.kernel) for w in ways(("sdpa",), host="unpatched")] == [
        ("unpatched", "sdpa"),
        ("sdpa", "sdpa"),
    ]


def test_what_was_foreseen_for_a_way():
    host, sage, ours = Way("unpatched"), Way("sage", "sage"), Way("policy", policy=POLICY)
    assert host.foreseen(POLICY).ms == 9.0
    assert ours.foreseen(POLICY).ms == 6.0
    assert sage.foreseen(POLICY) is None
    assert host.foreseen(None) is None
    assert foreseen_saving(ours, host, POLICY) == 3.0
    assert foreseen_saving(sage, host, POLICY) is None


def test_runs_that_nobody_foresaw():
    assert list(mismatches(None, device="H100", calls=8)) == []
    assert list(mismatches(FORESEEN, device="H100", calls=60)) == []
    assert len(list(mismatches(FORESEEN, device="H200", calls=8))) == 2
