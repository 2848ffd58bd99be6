"""Lanes of a local Ray of two workers; without Ray a sentence says how to get it."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from sage_plugin.errors import DeviceError, UsageError
from sage_plugin.registry import load
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.tune.configs import ray_lanes
from sage_plugin.tune.configs.inputs import from_drawn
from sage_plugin.tune.configs.plan import TuningRequest, build
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from tests.tune.captures import GROUPED, SELF
from tests.tune.test_subprocess_runner import FAST

ROOT = Path(__file__).resolve().parents[2]


def plan(tmp_path):
    request = TuningRequest(
        from_drawn(map(ReplayInputs, (SELF, GROUPED))),
        device="cpu",
        timer=FAST,
        config_dir=tmp_path / "configs",
        runs_dir=tmp_path / "runs",
    )
    return build(request)


def test_without_ray_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DeviceError, match=r"pip install 'sage-plugin\[ray\]'"):
        ray_lanes.lanes(plan(tmp_path))


@pytest.fixture
def ray(monkeypatch):
    ray = pytest.importorskip("ray")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_two_workers_share_the_studies_and_one_ledger_has_it_all(ray, tmp_path):
    made = plan(tmp_path)
    first, *more = ray_lanes.lanes(made)
    assert len(more) == 1
    report = tune(made, first, more_lanes=more)
    assert [outcome.study.id for outcome in report.outcomes] == [s.id for s in made.studies]
    assert all(outcome.trials == {"ok": 3} for outcome in report.outcomes)
    ledger = Ledger(made.run_folder / run_folder.LEDGER)
    assert all(len(ledger.trials(study.id, "screen")) == 3 for study in made.studies)
    assert len(load.read(made.registry_path).entries) == 2
    other = dataclasses.replace(made.facts, slug="another-cpu", name="another CPU")
    with pytest.raises(UsageError, match="configs of different devices are tuned apart"):
        ray_lanes.lanes(dataclasses.replace(made, facts=other))


def test_a_lost_machine_costs_the_trial_that_it_ran(ray, tmp_path):
    made = plan(tmp_path)
    study = made.studies[0]
    lane, *_ = lanes = ray_lanes.lanes(made)
    assert lane.judge(study, study.default).status == "ok"
    pid = ray.get(lane._actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, 9)
    lost = lane.judge(study, study.default)
    while lost.status == "crashed":
        assert "the lane was lost" in lost.reason
        lost = lane.judge(study, study.default)
    assert lost.status == "ok"
    for one in lanes:
        one.close()
