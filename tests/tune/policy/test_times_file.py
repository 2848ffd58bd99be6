"""Times from elsewhere, which anybody may have written."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.tune.policy import times_file
from sage_plugin.tune.policy.times_file import read, scaled
from tests.tune.policy import recordings
from tests.tune.policy.recordings import CROSS, DEVICE, MS, SHAPE


def test_times_by_shape_and_kernel_with_the_device(tmp_path):
    path = recordings.times(tmp_path / "t.json", shapes=(SHAPE, CROSS))
    assert read(path) == (DEVICE, {SHAPE: MS, CROSS: MS})


def test_times_of_emulations_are_no_times(tmp_path):
    path = recordings.times(tmp_path / "t.json")
    path.write_text(path.read_text().replace('"note": ""', '"note": "emulation: not a speed"'))
    with pytest.raises(ConfigError, match="no times of kernels on a GPU"):
        read(path)


def file_with(row):
    good = {"note": "", "kernel": "sage", "shape": SHAPE.to_json(), "time": {"median_ms": 1.0}}
    return json.dumps({"device": {"name": "x"}, "tables": [{"rows": [{**good, **row}]}]})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "7", "null", "{}", '{"device": []}', '{"device": {"name": "x"}, "tables": 3}',
        "[" * 100_000, "\0\1", '{"device": {"name": "x"}, "tables": [{"rows": [[]]}]}',
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
    ],
)  # fmt: skip
def test_what_sage_bench_did_not_write_is_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"t\.json") as caught:
        read(path)
    assert len(str(caught.value)) < 600


def test_missing_and_huge_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no such file|not a regular file"):
        read(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"no such file|not a regular file"):
        read(tmp_path)
    monkeypatch.setattr(times_file, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="larger than 100 bytes"):
        read(recordings.times(tmp_path / "t.json"))


def test_a_call_goes_by_the_nearest_one_of_its_form():
    near = dataclasses.replace(SHAPE, seq_q=32)
    far = dataclasses.replace(SHAPE, batch=2)  # half of the second, four times the first
    times = {near: {"sdpa": 3.0}, dataclasses.replace(SHAPE, batch=4): {"sdpa": 100.0}}
    assert scaled(times, SHAPE) == {"sdpa": 6.0}
    assert scaled(times, far) == {"sdpa": 50.0}
    assert scaled(times, dataclasses.replace(SHAPE, causal=True)) == {}
    assert scaled(times, dataclasses.replace(SHAPE, head_dim=64)) == {}
    assert scaled({near: {"sdpa": 3.0}}, dataclasses.replace(SHAPE, batch=3)) == {}
