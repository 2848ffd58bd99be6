"""Files of tilings of grouped products: what we write is what we read, others' are checked."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.registry import tiling_files
from sage_plugin.schema import LinearKey
from tests.registry import samples

NAME = "m512_k64_n96_g8.json"
FILE = {"optimal_tiling": [512, 1024, 64], "best_time_ms": 0.25, "timestamp": 1.0}
KEY = LinearKey("fp8_row", "triton", 64, 96, "bfloat16", 512, 8)


def test_a_file_of_the_earlier_tuner_is_read_and_its_tile_cut_to_what_fits(tmp_path):
    path = tmp_path / NAME
    path.write_text(json.dumps(FILE))
    row = tiling_files.read(path)
    assert (row.rows, row.in_features, row.out_features, row.groups) == (512, 64, 96, 8)
    assert row.fields == {"block_m": 128, "block_k": 128, "block_n": 64}
    assert row.time_ms == 0.25


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("m512_k64_n96.json", FILE, "expected a name such as"),
        (NAME, [], "optimal_tiling is None"),
        (NAME, FILE | {"optimal_tiling": [1, 2]}, "three sizes"),
        (NAME, FILE | {"optimal_tiling": [1, 2, True]}, "three sizes"),
        (NAME, FILE | {"best_time_ms": 0}, "best_time_ms is 0"),
    ],
)
def test_what_is_not_such_a_file_is_named(tmp_path, name, data, says):
    path = tmp_path / name
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=says):
        tiling_files.read(path)


def test_entries_come_back_the_fastest_of_each_call_and_others_are_left_out(tmp_path):
    slow = samples.linear_entry(KEY, samples.LINEAR_CONFIG.replaced(block_m=64))
    fast = samples.linear_entry(
        dataclasses.replace(KEY, kernel="int8_row"),
        samples.LINEAR_CONFIG.replaced(block_m=32, block_n=128, block_k=64),
    )
    faster = dataclasses.replace(
        fast, evidence=dataclasses.replace(fast.evidence, time=samples.timing(0.001))
    )
    others = [samples.entry(), samples.linear_entry()]
    made, left_out = tiling_files.write([slow, faster, *others], "now")
    assert sorted(map(id, left_out)) == sorted(map(id, others))
    assert list(made) == [NAME]
    (tmp_path / NAME).write_text(json.dumps(made[NAME]))
    row = tiling_files.read(tmp_path / NAME)
    assert row.fields == {"block_m": 32, "block_k": 64, "block_n": 128}
    assert row.time_ms == 0.001
