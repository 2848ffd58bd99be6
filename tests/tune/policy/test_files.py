"""Files of times and of sensitivities, which anybody may have written."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.tune.policy import sensitivity_file, times_file
from sage_plugin.tune.policy.sensitivity_file import Sensitivities, Sensitivity
from sage_plugin.tune.policy.times_file import scaled
from tests.tune.policy import recordings
from tests.tune.policy.recordings import CROSS, DEVICE, MS, SHAPE

SOUND = Sensitivities(
    1, "fav3_fp8", (Sensitivity("a.attn", ":50%", 0.25), Sensitivity("a.attn", "50%:", 0.0))
)


def test_times_by_shape_and_kernel_with_the_device(tmp_path):
    path = recordings.times(tmp_path / "t.json", shapes=(SHAPE, CROSS))
    assert times_file.read(path) == (DEVICE, {SHAPE: MS, CROSS: MS})


def test_sensitivities_are_read_back(tmp_path):
    path = tmp_path / "e.json"
    path.write_text(json.dumps(SOUND.to_json()))
    assert sensitivity_file.read(path) == SOUND


def test_times_of_emulations_are_no_times(tmp_path):
    path = recordings.times(tmp_path / "t.json")
    path.write_text(path.read_text().replace('"note": ""', '"note": "emulation: not a speed"'))
    with pytest.raises(ConfigError, match="no times of kernels on a GPU"):
        times_file.read(path)


def file_with(row):
    good = {"note": "", "kernel": "sage", "shape": SHAPE.to_json(), "time": {"median_ms": 1.0}}
    return json.dumps({"device": {"name": "x"}, "tables": [{"rows": [{**good, **row}]}]})


def changed(**fields):
    return json.dumps({**SOUND.to_json(), **fields})


def rmse(value):
    return changed(cells=[{"layer": "a", "steps": "", "rmse": value}])


NO_FILES = ["", "[]", "null", "{}", "[" * 100_000, "\0"]
NO_TIMES = [
    *NO_FILES, "7", '{"device": []}', '{"device": {"name": "x"}, "tables": 3}',
    '{"device": {"name": "x"}, "tables": [{"rows": [[]]}]}',
    file_with({"time": {"median_ms": 0}}),
    file_with({"time": {"median_ms": -1.0}}),
    file_with({"time": {"median_ms": float("nan")}}),
    file_with({"time": {"median_ms": 10**400}}),
    file_with({"time": {"median_ms": "fast"}}),
    file_with({"time": None}),
    file_with({"shape": {}}),
    file_with({"shape": {**SHAPE.to_json(), "batch": 0}}),
    file_with({"shape": {**SHAPE.to_json(), "seq_k": -64}}),
    file_with({"kernel": ["sage"]}),
]  # fmt: skip
NO_SENSITIVITIES = [
    *NO_FILES, changed(cells=[]), changed(cells=3), changed(schema_version=2), changed(more=1),
    changed(kernel=None), rmse(-0.1), rmse(float("nan")), rmse(float("inf")), rmse(10**400),
    rmse("much"), rmse(True), changed(cells=[{"layer": "a", "rmse": 1.0}]),
]  # fmt: skip
WRONG = [(times_file, text) for text in NO_TIMES]
WRONG += [(sensitivity_file, text) for text in NO_SENSITIVITIES]


@pytest.mark.parametrize(("module", "text"), WRONG)
def test_what_nobody_measured_is_refused_in_one_sentence(tmp_path, module, text):
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"e\.json") as caught:
        module.read(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("module", [times_file, sensitivity_file])
def test_missing_and_huge_files_are_refused(tmp_path, monkeypatch, module):
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(ConfigError, match=r"no such file|not a regular file"):
            module.read(path)
    monkeypatch.setattr(module, "MAX_BYTES", 50)
    with pytest.raises(ConfigError, match="larger than 50 bytes"):
        module.read(recordings.times(tmp_path / "t.json"))


def test_a_call_goes_by_the_nearest_one_of_its_form():
    near = dataclasses.replace(SHAPE, seq_q=32)
    far = dataclasses.replace(SHAPE, batch=2)  # half of the second, four times the first
    times = {near: {"sdpa": 3.0}, dataclasses.replace(SHAPE, batch=4): {"sdpa": 100.0}}
    assert scaled(times, SHAPE) == {"sdpa": 6.0}
    assert scaled(times, far) == {"sdpa": 50.0}
    assert scaled(times, dataclasses.replace(SHAPE, causal=True)) == {}
    assert scaled(times, dataclasses.replace(SHAPE, head_dim=64)) == {}
    assert scaled({near: {"sdpa": 3.0}}, dataclasses.replace(SHAPE, batch=3)) == {}
