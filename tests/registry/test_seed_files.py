"""Files of best configs: what we write is what we read, and what others wrote is checked."""

from __future__ import annotations

import json

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.registry import seed_files
from tests.registry import samples

ROW = {
    "config": {
        "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 32, "num_warps": 4, "num_stages": 2,
        "waves_per_eu": 2, "stage": 1,
    },
    "time_ms": 1.234, "batch_size": 2, "num_heads": 5, "head_dim": 128,
}  # fmt: skip


def changed(**fields):
    return {"8192": {**ROW, **fields}}


def test_a_file_of_the_earlier_tuner_is_read(tmp_path):
    path = tmp_path / "best_configs_B2_H5_S8192_D128_20260101_120000.json"
    path.write_text(json.dumps({"8192": ROW}))
    (row,) = seed_files.read(path)
    assert (row.seq_len, row.batch, row.heads, row.head_dim, row.time_ms) == (
        8192,
        2,
        5,
        128,
        1.234,
    )
    assert row.fields == {
        "block_m": 128, "block_n": 32, "num_warps": 4, "num_stages": 2, "waves_per_eu": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "expected an object"),
        ({}, "expected an object"),
        ({"8192": 5}, "expected an object with a config"),
        ({"0": ROW}, "expected a sequence length"),
        ({"8k": ROW}, "expected a sequence length"),
        (changed(config={"BLOCK_M": 64}), "unknown field 'BLOCK_M'"),
        (changed(config={"num_warps": True}), "num_warps is True"),
        (changed(config={"num_warps": -1}), "num_warps is -1"),
        (changed(time_ms=0), "time_ms is 0"),
        (changed(time_ms=None), "time_ms is None"),
        (changed(batch_size=0), "batch_size is 0"),
        (changed(num_heads="5"), "num_heads is '5'"),
    ],
)
def test_what_is_not_such_a_file_is_named(tmp_path, data, says):
    path = tmp_path / "best.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"best\.json: .*" + says):
        seed_files.read(path)


def sage(seq: int, block_m: int = 128, time_ms: float = 1.0, *, synthetic=False, **key):
    key = {"kernel": "sage", "seq_q": seq, "seq_k": seq, "batch_heads": 10} | key
    evidence = samples.evidence(time=samples.timing(time_ms), synthetic=synthetic)
    return samples.entry(samples.key(**key), samples.config(block_m=block_m), because=evidence)


def test_entries_come_back_by_heads_and_channels(tmp_path):
    entries = [sage(16_384), sage(8192, 64, 2.5), sage(8192, head_dim=128)]
    other = [
        samples.entry(), sage(1, causal=True), sage(2, gqa_ratio=2), sage(3, mask_kind="dense"),
        sage(4, seq_k=8),
    ]  # fmt: skip
    made, left_out = seed_files.write([*entries, *other], "20260101_120000")
    assert sorted(map(id, left_out)) == sorted(map(id, other))
    first = "best_configs_B1_H10_S8192_16384_D64_20260101_120000.json"
    assert list(made) == [first, "best_configs_B1_H10_S8192_D128_20260101_120000.json"]
    path = tmp_path / first
    path.write_text(json.dumps(made[first]))
    short, long = seed_files.read(path)
    assert (short.seq_len, short.heads, short.fields["block_m"], short.time_ms) == (
        8192,
        10,
        64,
        2.5,
    )
    assert (long.seq_len, long.fields["block_m"]) == (16_384, 128)


def test_captures_stand_before_speed_where_the_form_cannot_tell_two_apart():
    slow, fast = sage(64, 32, 2.0), sage(64, 64, 1.0, dtype="float16")
    drawn = sage(64, 16, 0.5, layout="bshd", synthetic=True)
    made, _ = seed_files.write([slow, drawn, fast], "now")
    (content,) = made.values()
    assert content["64"]["config"]["BLOCK_SIZE_M"] == 64
