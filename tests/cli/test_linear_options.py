"""`--op linear`: shapes, formats and parallelism as options spell them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sage_plugin.cli.linear_options import LinearOptions
from sage_plugin.cli.options import DrawnInputOptions
from sage_plugin.registry import load
from sage_plugin.schema import LinearLaunch
from tests.capture.toys import SCRIPT
from tests.cli.program import sage
from tests.registry.samples import FACTS
from tests.tune.scripted import ScriptedRunner

SMALL = ("--op", "linear", "--out-in-features", "96/128", "--batch-sizes", "32")


def test_every_kernel_is_compared_with_the_baseline(tmp_path) -> None:
    file = tmp_path / "out.json"
    done = sage("bench", *SMALL, "--compare-to-ref", "bf16", "--json", str(file), "--gate")
    assert done.exit_code == 0, done.output
    [table] = json.loads(file.read_text())["tables"]
    assert table["shape"] == {
        "rows": 32, "in_features": 128, "out_features": 96, "dtype": "bfloat16", "bias": False,
            "groups": 0,
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


@pytest.fixture(autouse=True)
def _runner(script) -> None:
    script(ScriptedRunner(speed))


def speed(config: LinearLaunch) -> float:
    return 1.0 - 0.2 * (config.block_n == 32)


FEW = ("--op", "linear", "--out-in-features", "4096/4096", "--batch-sizes", "16,256")
INT8 = ("--kernel", "int8_row:triton")


def test_a_dry_run_shows_what_would_be_tuned(on_gpu) -> None:
    done = sage("tune", *FEW, *INT8, "--tp-size", "2", "--dry-run", "--config-dir", "c")
    assert done.exit_code == 0, done.stderr
    assert "4,096->2,048" in done.stdout
    assert "256 rows" in done.stdout
    assert "64x64x128 w4 s4" in done.stdout  # the default of 16 rows
    assert f"winners to c/{FACTS.slug}/linear.json" in " ".join(done.stdout.split())
    assert not Path("tuning_runs").exists()


def test_what_was_tuned_is_shown_listed_and_explained(on_gpu) -> None:
    done = sage("tune", *FEW, *INT8, "--config-dir", "c")
    assert done.exit_code == 0, done.stderr
    for words in ("4,096->4,096", "64x32x128 w4", "20.0%", "entry written"):
        assert words in done.stdout
    assert "patch(pipe, linears='auto') uses them" in " ".join(done.stdout.split())
    path = Path("c") / FACTS.slug / "linear.json"
    assert {entry.key.rows for entry in load.read(path).entries} == {16, 256}
    listed = sage("configs", "list", "--config-dir", "c", "--as", FACTS.slug).stdout
    assert "int8_row:triton" in listed
    assert "16 rows" in listed
    assert "64x32x128 w4" in listed
    assert sage("configs", "check", path).exit_code == 0
    about = ("--config-dir", "c", "--as", FACTS.slug, "--op", "linear", "--batch-sizes", "20")
    told = sage("configs", "explain", *about, "--out-in-features", "4096/4096", *INT8)
    assert "near match, measured at rows 16;" in " ".join(told.stdout.split())
    assert "It gets 64x32x128 w4" in told.stdout
    other = sage("configs", "explain", *about, "--out-in-features", "1024/4096", *INT8).stdout
    assert "out_features is 4096 there, 1024 here" in " ".join(other.split())
    assert "sage tune --kernel int8_row:triton --op linear" in " ".join(other.split())


def test_recorded_linears_are_compared_and_tuned_on_their_own_tensors(request, tmp_path) -> None:
    script = tmp_path / "theirs.py"
    script.write_text(SCRIPT.format(patch="", end=""))
    words = ("--op", "attention,linear", "--rows", "24", "--max-captures", "3", "--out", "both")
    done = sage("capture", *words, script, "1")
    assert done.exit_code == 0, done.output
    told = " ".join(done.stdout.split())
    assert "Counted 21 attention and linear calls" in told
    assert "hold 24 of 80 rows" in told
    assert (
        "Next: sage bench both --op linear; sage tune both --op linear where there is a GPU" in told
    )
    done = sage("bench", "both", "--op", "linear", "--kernel", "int8_row", "--compare-to-ref",
                "bf16", "--csv", "rows.csv")  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = Path("rows.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]].count("capture") == 6
    request.getfixturevalue("on_gpu")
    done = sage("tune", "both", "--op", "linear", *INT8, "--dry-run", "--config-dir", "c")
    assert done.exit_code == 0, done.output
    assert "80 rows" in done.stdout
    missing = sage("bench", "both", "--op", "linear", "--out-in-features", "8/8")
    assert "leave it out, or the captures both" in missing.output


def test_a_product_of_torch_has_no_config_to_explain() -> None:
    about = ("--op", "linear", "--batch-sizes", "4096", "--out-in-features", "4096/4096")
    told = sage("configs", "explain", *about, "--as", "nvidia-h200").stdout
    assert "torch has no launch config." in told
    assert "--kernel fp8_row:triton" in told


def test_without_captures_or_shapes_both_ways_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = sage("bench", "--op", "linear")
    assert done.exit_code == 2
    assert "sage capture --op linear records them), or --out-in-features OUT/IN" in " ".join(
        done.output.split()
    )
