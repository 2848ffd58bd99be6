"""One error budget over attention and linears, on a recording of both."""

from __future__ import annotations

import dataclasses
import json

import pytest

import sage_plugin
from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError, ConfigError, UsageError
from sage_plugin.tune.policy import times_file
from sage_plugin.tune.policy.search import search
from tests.capture.toys import LAYERS, denoise, video_model
from tests.tune.policy import recordings

MS = {
    "attention": {"sdpa": 1.0, "sage": 0.7},
    "linear": {"bf16": 0.4, "fp8_row": 0.2, "int8_row": 0.3},
}
STEPS, EACH = 2, 6
CALLS = STEPS * LAYERS * (1 + EACH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Captures of every layer and linear, and times of each op family in a file of its own."""
    path = tmp_path_factory.mktemp("joint")
    model = video_model()
    with record(model, path / "captures", ops="attention,linear", max_captures=36):
        denoise(model, steps=STEPS)
    for op, ms in MS.items():
        shapes = {r.shape for r in open_captures(path / "captures", op).records}
        recordings.times(path / f"{op}.json", ms, tuple(shapes))
    return path


def request(folder, **changes):
    both = (folder / "attention.json", folder / "linear.json")
    # One ledger for all: what was measured is not measured again.
    base = recordings.request(folder, times=both, min_seq=8)
    return dataclasses.replace(base, **changes)


def test_the_budget_is_the_mean_over_the_calls_of_both(folder):
    found = search(request(folder, max_error=0.004))
    pairs = list(zip(found.problem.cells, found.assignment.picks, strict=True))
    assert len(pairs) == LAYERS * 2 + LAYERS * EACH
    spent = sum(cell.calls_per_run * pick.error for cell, pick in pairs) / CALLS
    assert found.assignment.error == pytest.approx(spent)
    assert 0.003 < spent <= 0.004
    unpatched = STEPS * LAYERS * (1.0 + EACH * 0.4)
    assert found.prediction.of("sdpa").ms == pytest.approx(unpatched)
    all_linears = found.prediction.of("fp8_row")
    assert all_linears.ms == pytest.approx(unpatched - STEPS * LAYERS * EACH * 0.2)
    assert found.prediction.calls == STEPS * LAYERS
    # The knapsack took what brings most for its error, whichever op it is of.
    taken = {cell.op for cell, pick in pairs if pick.error}
    left = {cell.op for cell, pick in pairs if not pick.error}
    assert "linear" in taken
    assert left
    rules = {rule.op: rule for rule in found.policy.rules}
    assert (rules["linear"].steps, rules["linear"].min_seq) == ("", 0)


def test_the_policy_runs_what_was_chosen(folder):
    found = search(request(folder, max_error=1.0, max_layer_error=0.5, step_ranges=1))
    model = video_model()
    with sage_plugin.patched(model, policy=found.policy, min_seq=8) as handle:
        denoise(model, steps=1)
    report = handle.report()
    pairs = zip(found.problem.cells, found.assignment.picks, strict=True)
    picked = {cell.layer: pick.label for cell, pick in pairs}
    quantized = {
        layer: label for layer, label in picked.items() if label in ("fp8_row", "int8_row")
    }
    assert {row.layer: row.kernel for row in report.linears} == quantized
    assert len(quantized) == LAYERS * EACH
    assert {label for row in report.rows for label in row.calls} == {"sage:emulation"}


def test_named_kernels_choose_the_op_families(folder, tmp_path):
    found = search(request(folder, max_error=1.0, kernels=("fp8_row",)))
    assert {cell.op for cell in found.problem.cells} == {"linear"}
    assert {rule.op for rule in found.policy.rules} == {"linear"}
    assert found.prediction.calls == 0
    assert found.problem.words == "linears"
    with pytest.raises(UsageError, match="a rule of linears names no backend"):
        search(request(folder, kernels=("fp8_row:torch",)))
    recordings.write(tmp_path / "attention_alone")
    alone = request(folder, kernels=("fp8_row",))
    alone = dataclasses.replace(alone, folder=tmp_path / "attention_alone")
    with pytest.raises(CaptureError, match=r"no captures of linear.*--op attention,linear"):
        search(alone)


def test_a_sensitivity_of_one_op_family_is_not_enough_for_both(folder, tmp_path):
    path = tmp_path / "s.json"
    cells = [{"layer": "transformer.transformer_blocks.0.attn1", "steps": ":50%", "rmse": 0.1}]
    path.write_text(json.dumps({"schema_version": 1, "kernel": "sage", "cells": cells}))
    linears = request(folder, kernels=("fp8_row",), sensitivity=path)
    with pytest.raises(ConfigError, match="--kernel fav3_fp8 --kernel fp8_row"):
        search(linears)


def test_times_of_two_devices_are_not_joined(folder, tmp_path):
    other = json.loads((folder / "linear.json").read_text())
    other["device"]["name"] = "another GPU"
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="has times of another GPU"):
        times_file.read(folder / "attention.json", tmp_path / "other.json")
