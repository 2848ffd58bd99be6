"""`sage bench --op linear`: shapes, formats and parallelism as options spell them."""

from __future__ import annotations

import json

import pytest

from sage_plugin.cli.linear_options import LinearOptions
from sage_plugin.cli.options import DrawnInputOptions
from sage_plugin.errors import UsageError
from tests.cli.program import sage

SMALL = ("--op", "linear", "--out-in-features", "96/128", "--batch-sizes", "32")


def test_every_kernel_is_compared_with_the_baseline(tmp_path) -> None:
    file = tmp_path / "out.json"
    done = sage("bench", *SMALL, "--compare-to-ref", "bf16", "--json", str(file), "--gate")
    assert done.exit_code == 0, done.output
    [table] = json.loads(file.read_text())["tables"]
    assert table["shape"] == {
        "rows": 32, "in_features": 128, "out_features": 96, "dtype": "bfloat16", "bias": False,
    }  # fmt: skip
    rows = {row["kernel"]: row for row in table["rows"]}
    assert [*rows] == ["bf16", "fp8_tensor", "fp8_row", "int8_row"]
    assert rows["bf16"]["errors"]["rel_l1"] < 1e-6
    assert 0.005 < rows["int8_row"]["errors"]["rel_l1"] < 0.015
    assert rows["fp8_row"]["flops"] == 2 * 32 * 128 * 96
    assert "32x128->96 bf16" in done.output


def test_a_format_names_its_kernel(tmp_path) -> None:
    file = tmp_path / "out.json"
    formats = ("--x-q-dtype", "int8", "--w-q-dtype", "int8")
    assert sage("bench", *SMALL, *formats, "--json", str(file)).exit_code == 0
    [table] = json.loads(file.read_text())["tables"]
    assert [row["kernel"] for row in table["rows"]] == ["int8_row"]


SPLITS = (
    ({}, [(12, 8)]),
    ({"tp_size": 4}, [(3, 8)]),
    ({"tp_size": 4, "tp_split_dim": "in"}, [(12, 2)]),
    ({"out_in_features": ["12/8,6/4", "12/8"]}, [(12, 8), (6, 4)]),
)


@pytest.mark.parametrize(("changes", "features"), SPLITS)
def test_shapes_are_those_of_one_device(changes, features) -> None:
    options = LinearOptions(
        **({"op": "linear", "out_in_features": ["12/8"], "batch_sizes": ["2,3"]} | changes)
    )
    shapes = [one.shape for one in options.inputs(DrawnInputOptions())]
    assert [(s.out_features, s.in_features, s.rows) for s in shapes] == [
        (*pair, rows) for pair in features for rows in (2, 3)
    ]


WRONG = (
    ((*SMALL[:2], "--batch-sizes", "2"), "--out-in-features"),
    ((*SMALL[:2], "--out-in-features", "12", "--batch-sizes", "2"), "pairs as OUT/IN"),
    ((*SMALL[:2], "--out-in-features", "a/2", "--batch-sizes", "2"), "--out-in-features 'a'"),
    ((*SMALL, "--tp-size", "5"), "--tp-size 5 does not divide out features 96"),
    ((*SMALL, "--tp-split-dim", "up"), "--tp-split-dim 'up'"),
    ((*SMALL, "--x-q-dtype", "fp8", "--w-q-dtype", "int8"), "give both the same"),
    ((*SMALL, "--x-q-dtype", "fp4"), "--x-q-dtype 'fp4'"),
    ((*SMALL, "--seq-len", "64"), "--seq-len belongs to attention"),
    ((*SMALL, "--kernel", "sage"), "kernel 'sage' is not known"),
    ((*SMALL, "captured"), "drawn, not captured"),
    (("--op", "convolution"), "--op 'convolution'"),
    (("--seq-len", "64", "--tp-size", "2"), "add --op linear"),
)


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_is_wrong_is_named(words, message: str) -> None:
    done = sage("bench", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_options_of_linears_need_the_family() -> None:
    with pytest.raises(UsageError, match="add --op linear"):
        LinearOptions(batch_sizes=["2"]).chosen  # noqa: B018
