"""Several lanes share the studies; what happens to one is a row, and the run goes on."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from sage_plugin import device as devices
from sage_plugin.device import Gpu
from sage_plugin.errors import DeviceError, UsageError
from sage_plugin.registry import load
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.tune.configs import lanes as lanes_module
from sage_plugin.tune.configs import plan as plans
from sage_plugin.tune.configs import subprocess_runner
from sage_plugin.tune.configs.forecast import forecast
from sage_plugin.tune.configs.inputs import from_drawn
from sage_plugin.tune.configs.plan import TuningRequest, build
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.configs.space_file import SpaceFile
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run import study as study_module
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.search.search import SearchLimits
from tests.registry import samples
from tests.tune import scripted
from tests.tune.captures import GROUPED, SELF
from tests.tune.scripted import ScriptedRunner

LENGTHS = (1024, 2048, 4096, 8192)


def meeting(parties: int):
    """Hold each lane at its first candidate until all lanes work."""
    barrier = threading.Barrier(parties)

    def before(count: int) -> None:
        if count == 0:
            barrier.wait(timeout=30)

    return before


def test_lanes_share_the_studies_and_each_stays_on_one(tmp_path):
    studies = [scripted.study(6, seq_q=n) for n in LENGTHS]
    plan = scripted.plan(tmp_path, *studies)
    before = meeting(2)
    runners = [ScriptedRunner(noise=0.003, before=before, seed=i) for i in range(2)]
    report = tune(plan, runners[0], more_lanes=runners[1:])
    assert [outcome.study.id for outcome in report.outcomes] == [study.id for study in studies]
    assert {entry.key.seq_q for entry in load.read(plan.registry_path).entries} == {*LENGTHS}
    worked = [runner.studies for runner in runners]
    assert all(worked)
    assert not worked[0] & worked[1]
    assert worked[0] | worked[1] == {study.id for study in studies}
    assert len(Ledger(plan.run_folder / run_folder.LEDGER).all()) == sum(
        len(runner.screened) + sum(map(len, runner.raced)) for runner in runners
    )
    assert all(runner.closed for runner in runners)


def test_a_device_whose_configs_all_fail_costs_its_studies_alone(tmp_path):
    studies = [scripted.study(4, seq_q=n) for n in LENGTHS[:2]]
    plan = scripted.plan(tmp_path, *studies)
    before = meeting(2)
    sick = dict.fromkeys(studies[0].space, "crashed")
    runners = [ScriptedRunner(before=before, fails=sick), ScriptedRunner(before=before)]
    report = tune(plan, runners[0], more_lanes=runners[1:])
    assert sorted(outcome.verdict for outcome in report.outcomes) == ["confirmed", "failed"]
    rows = Ledger(plan.run_folder / run_folder.LEDGER).all()
    assert sum(row.status == "crashed" for row in rows) == 4


def test_ctrl_c_in_one_lane_ends_all_and_keeps_what_is_known(tmp_path):
    studies = [scripted.study(6, seq_q=n) for n in LENGTHS]
    plan = scripted.plan(tmp_path, *studies)
    meet, pressed = meeting(2), threading.Event()

    def press(count: int) -> None:
        meet(count)
        if count == 3:
            pressed.set()
            raise KeyboardInterrupt

    class Waiting(ScriptedRunner):
        """Hangs in its third candidate until it is cancelled."""

        def judge(self, study, config):
            if len(self.screened) == 2:
                pressed.wait(30)
                self.gone.wait(30)
                raise KeyboardInterrupt
            return super().judge(study, config)

        def cancel(self) -> None:
            super().cancel()
            self.gone.set()

    waiting = Waiting(before=meet)
    waiting.gone = threading.Event()
    report = tune(plan, ScriptedRunner(before=press), more_lanes=[waiting])
    assert report.interrupted
    assert waiting.cancelled
    assert waiting.closed
    assert report.outcomes == ()
    assert len(report.unfinished) == 2
    results = json.loads((plan.run_folder / run_folder.RESULTS).read_text())
    assert len(results["unfinished"]) == 2


@pytest.fixture
def machine(monkeypatch):
    """Two equal GPUs, and one of another kind."""
    kinds = ["nvidia-h200", "nvidia-h200", "nvidia-l4"]
    every = tuple(Gpu(i, f"GPU-{i}") for i in range(3))
    facts = [dataclasses.replace(samples.FACTS, slug=kind, arch="sm_90") for kind in kinds]
    monkeypatch.setattr(devices, "gpus", lambda: every)
    monkeypatch.setattr(devices, "facts", lambda at: facts[getattr(at, "index", at) or 0])
    monkeypatch.setattr(plans.torch.cuda, "is_available", lambda: True)
    return every


def test_gpus_are_named_by_number_and_pinned_by_uuid(machine, monkeypatch):
    assert lanes_module.chosen_gpus("0,1") == machine[:2]
    assert lanes_module.chosen_gpus("1") == machine[1:2]
    with pytest.raises(UsageError, match="nvidia-h200 and nvidia-l4 have configs of their own"):
        lanes_module.chosen_gpus("all")
    with pytest.raises(UsageError, match=r"'7' is not all or one of 0, 1, 2"):
        lanes_module.chosen_gpus("0,7")
    made = []
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(subprocess_runner, "SubprocessRunner", lambda **told: made.append(told))
    plan = build(request(gpus=machine[:2]))
    lanes_module.lanes(plan, 3)
    assert [told["gpu"] for told in made] == ["GPU-0", "GPU-1"]
    assert made[0]["pool"] is made[1]["pool"] is not None
    made[0]["pool"].close()


def request(**changes) -> TuningRequest:
    return TuningRequest(from_drawn(map(ReplayInputs, (SELF, GROUPED))), **changes)


def test_commands_on_two_equal_gpus_have_folders_of_their_own(machine):
    names = [
        build(request(device=f"cuda:{index}", gpus=gpus)).run_folder
        for index, gpus in ((0, ()), (1, ()), (0, machine[:2]))
    ]
    assert len(set(names)) == 3
    assert names[0] == build(request(device="cuda:0")).run_folder
    assert build(request(device="cuda:0", gpus=machine[:1])).run_folder == names[0]


def test_without_a_gpu_there_are_no_lanes_to_choose():
    with pytest.raises(DeviceError, match="no GPU"):
        lanes_module.chosen_gpus("all")


def test_shards_are_the_whole_and_have_folders_of_their_own(tmp_path):
    whole = build(request(device="cpu", kernels=("sage", "fav2", "fav3_sage")))
    shards = [
        build(request(device="cpu", kernels=("sage", "fav2", "fav3_sage"), shard=(i, 4)))
        for i in range(1, 5)
    ]
    ids = [study.id for shard in shards for study in shard.studies]
    assert sorted(ids) == sorted(study.id for study in whole.studies)
    assert [len(shard.studies) for shard in shards] == [2, 2, 1, 1]
    assert shards[1].run_folder.name == f"{whole.run_folder.name}.shard-2-of-4"
    assert [len(shard.calls) for shard in shards] == [2, 2, 1, 1]
    for shard, match in (((3, 3), "fewer calls"), ((0, 2), "count from"), ((3, 2), "count from")):
        with pytest.raises(UsageError, match=match):
            build(request(device="cpu", shard=shard))


def test_a_method_is_part_of_the_study_and_one_that_the_device_has(machine):
    plain, graph = (build(request(device="cuda:0", method=m)) for m in (None, "graph"))
    assert [p.studies[0].timer.method for p in (plain, graph)] == ["events", "graph"]
    assert plain.studies[0].id != graph.studies[0].id
    with pytest.raises(UsageError, match="timing method 'graph' on cpu"):
        build(request(device="cpu", method="graph"))


def test_a_large_space_is_timed_in_more_rounds(machine, monkeypatch):
    monkeypatch.setattr(study_module, "LARGE_SPACE", 100)
    few = SpaceFile(Path("few.json"), (("block_n", (64, 128)),))
    for space, rounds in ((None, 5), (few, 3)):
        (study, *_) = build(request(device="cuda:0", space=space)).studies
        assert study.timer.screen_rounds == rounds
        assert (len(study.space) > 100) == (rounds == 5)


def test_a_forecast_counts_what_is_tried_and_who_compiles(machine):
    plan = build(request(device="cuda:0"))
    one, many = (forecast(plan, num_workers=n) for n in (1, 16))
    assert one.configs == many.configs > 2 * 20
    assert one.seconds > 8 * many.seconds
    lanes = build(request(gpus=machine[:2]))
    assert forecast(lanes, num_workers=1).seconds == pytest.approx(one.seconds / 2)
    short = build(request(device="cuda:0", limits=SearchLimits(max_trials=3, budget_s=60.0)))
    assert forecast(short, num_workers=1).configs == 6
    assert forecast(short, num_workers=1).seconds == 60.0
    assert "6 configs of 2 calls" in forecast(short, num_workers=1).text()
