"""Linears are tuned as attention is: same plan, same session, a file of their own."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from sage_plugin.errors import ConfigError, DeviceError, UsageError
from sage_plugin.families import LINEAR_FAMILY
from sage_plugin.registry import load, lookup
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import LinearKey, LinearLaunch, LinearShape
from sage_plugin.tune.configs import space_file
from sage_plugin.tune.configs.inputs import from_drawn
from sage_plugin.tune.configs.plan import TuningPlan, TuningRequest, build
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.held import runs
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.search.learned_order import learned
from sage_plugin.tune.search.search import SearchLimits, skip_reason, spread
from tests.registry.samples import FACTS
from tests.tune.scripted import ScriptedRunner

SMALL, LARGE = (LinearShape(rows, 4096, 4096, "bfloat16") for rows in (16, 4096))


def planned(folder: Path, *shapes: LinearShape, **changes) -> TuningPlan:
    inputs = from_drawn(ReplayInputs(one) for one in shapes or (SMALL,))
    fields = {
        "kernels": ("int8_row:triton",), "config_dir": folder / "configs",
        "runs_dir": folder / "runs", "run_name": "run", "family": LINEAR_FAMILY,
    }  # fmt: skip
    return build(TuningRequest(inputs, **{**fields, **changes}))


def speed(config: LinearLaunch) -> float:
    return 1.0 - 0.1 * (config.num_stages == 2) - 0.2 * (config.block_n == 32)


def test_a_plan_has_a_study_for_each_call_the_largest_first(on_gpu, tmp_path) -> None:
    plan = planned(tmp_path, SMALL, LARGE, kernels=("int8_row:triton", "fp8_row:triton"))
    assert [(study.key.kernel, study.key.rows) for study in plan.studies] == [
        ("int8_row", 4096), ("fp8_row", 4096), ("int8_row", 16), ("fp8_row", 16),
    ]  # fmt: skip
    assert plan.registry_path == tmp_path / "configs" / FACTS.slug / "linear.json"
    for study in plan.studies:
        assert study.default == LINEAR_FAMILY.default_launch(study.key, FACTS)
        legal = [LINEAR_FAMILY.illegal_reason(c, study.key, FACTS) for c in study.space]
        assert set(legal) == {None}
        assert study.gate == LINEAR_FAMILY.gate_for(study.key.kernel)


def test_a_session_writes_what_the_runtime_reads(on_gpu, tmp_path) -> None:
    plan = planned(tmp_path, SMALL, LARGE)
    report = tune(plan, ScriptedRunner(speed))
    key = LinearKey("int8_row", "triton", 4096, 4096, "bfloat16", 16)
    entries = {entry.key: entry for entry in load.read(plan.registry_path).entries}
    assert set(entries) == {key, dataclasses.replace(key, rows=4096)}
    best = min(plan.studies[1].space, key=speed)
    assert speed(entries[key].config) == speed(best) == 0.7
    assert (entries[key].rows_range, entries[key].evidence.synthetic) == ((16, 32), True)
    found = LINEAR_FAMILY.find_launch(key, FACTS, config_dir=str(tmp_path / "configs"))
    assert (found.config, found.source) == (entries[key].config, "exact")
    assert runs.results_of(plan.run_folder).entries == tuple(
        outcome.entry for outcome in report.outcomes
    )
    facts, times = runs.times_of([plan.run_folder])
    assert facts == FACTS
    assert times[key][best] / times[key][plan.studies[1].default] == pytest.approx(0.7)


def test_the_table_of_trials_has_the_fields_of_linears(on_gpu, tmp_path) -> None:
    plan = planned(tmp_path)
    tune(plan, ScriptedRunner(speed))
    rows = list(csv.DictReader((plan.run_folder / run_folder.TRIALS).open()))
    default = rows[0]
    assert (default["rows"], default["in_features"], default["out_features"]) == (
        "16",
        "4096",
        "4096",
    )
    assert (default["block_k"], default["group_m"]) == ("128", "8")
    assert "seq_q" not in default
    assert "smooth_k" not in default


def test_what_is_held_is_raced_and_a_run_goes_on_from_its_ledger(on_gpu, tmp_path) -> None:
    plan = planned(tmp_path)
    tune(plan, ScriptedRunner(speed))
    lookup.clear()
    held = load.read(plan.registry_path).entries[0].config
    again = ScriptedRunner(speed)
    tune(planned(tmp_path), again)
    assert again.screened == again.raced == []
    later = ScriptedRunner(speed)
    limits = SearchLimits(max_trials=2)
    tune(planned(tmp_path, run_name="later", limits=limits), later)
    assert later.screened == [plan.studies[0].default, held]


def test_an_order_is_learned_and_larger_configs_are_passed_over(on_gpu, tmp_path) -> None:
    plan = planned(tmp_path)
    report = tune(plan, ScriptedRunner(speed))
    assert len(report.outcomes) == 1
    trials = Ledger(plan.run_folder / run_folder.LEDGER).trials(plan.studies[0].id, "screen")
    rank = learned(trials.values(), {})
    space = plan.studies[0].space
    narrow = [c for c in space if c.block_n == 32]
    assert max(map(rank, narrow)) < rank(plan.studies[0].default)
    first = trials[plan.studies[0].default]
    assert skip_reason(first.config.replaced(block_k=256), [first])
    assert not skip_reason(first.config.replaced(block_k=64), [first])
    assert not skip_reason(first.config.replaced(group_m=4, block_k=256), [first])
    assert len(spread(space, 4, 0)) == 4


REFUSED = (
    ("fp8_row", UsageError, "kernel 'fp8_row' is fp8_row:torch on NVIDIA H100"),
    ("auto", UsageError, "name one of fp8_tensor:triton, fp8_row:triton, int8_row:triton"),
    ("bf16", UsageError, "no launch config"),
)


@pytest.mark.parametrize(("kernel", "error", "says"), REFUSED)
def test_what_has_no_launch_config_is_refused(on_gpu, tmp_path, kernel, error, says) -> None:
    with pytest.raises(error, match=says):
        planned(tmp_path, LARGE, kernels=(kernel,))


@pytest.mark.parametrize("kernel", ["auto", "int8_row", "int8_row:triton", "bf16"])
def test_a_cpu_tunes_no_linears(tmp_path, kernel) -> None:
    with pytest.raises(DeviceError, match="linears are tuned on a GPU only"):
        planned(tmp_path, kernels=(kernel,), device="cpu")


def test_a_search_space_of_a_file_names_fields_of_linears(on_gpu, tmp_path) -> None:
    path = tmp_path / "space.json"
    path.write_text('{"block_k": [64, 128], "num_warps": [4, 8]}')
    plan = planned(tmp_path, space=space_file.read(path, "linear"))
    assert sorted({(c.block_k, c.num_warps) for c in plan.studies[0].space}) == [
        (64, 4), (64, 8), (128, 4), (128, 8),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="unknown field 'block_k'"):
        space_file.read(path)
