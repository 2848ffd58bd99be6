"""`sage tune` from the outside: what it prints, writes and exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sage_plugin
from sage_plugin import device
from sage_plugin.cli import tune as tune_command
from sage_plugin.cli.tuning import options as tune_options
from sage_plugin.errors import UsageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.registry import load
from sage_plugin.tune.run import run_folder
from tests.cli import program
from tests.short import keep_short
from tests.tune import captures
from tests.tune.captures import DENSE, GROUPED, MASKED, SELF, WIDE
from tests.tune.scripted import ScriptedRunner

SLUG = device.facts("cpu").slug
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    keep_short(monkeypatch)


@pytest.fixture
def folder(tmp_path) -> Path:
    saved = [(SELF, (0, 1)), (GROUPED, (0, 1))]
    return captures.write(tmp_path / "captured_inputs", saved)


def sage(*words: object):
    return program.sage("tune", *words)


def test_the_whole_way_from_captures_to_the_next_call(folder, tmp_path):
    result = sage("--from-captures", "--config-dir", "configs")
    assert result.exit_code == 0, result.stderr
    path = Path("configs") / SLUG / "attention.json"
    assert f"Configs: {path}" in result.stdout
    assert f"Trials: tuning_runs/{SLUG}-" in result.stdout
    assert f"Next: sage bench {folder}" in result.stdout
    assert "fav3_sage:emulation" in result.stdout
    assert "emulation: not a speed" in result.stdout
    entries = load.read(path).entries
    assert {entry.key.layout for entry in entries} == {"bshd", "bhsd"}
    for entry in entries:
        facts = device.facts("cpu")
        found = dispatch.find_launch(entry.key, facts, config_dir="configs")
        assert (found.source, found.config) == ("exact", entry.config)
    q = torch.randn(1, 96, 4, 32, dtype=torch.bfloat16)
    out = sage_plugin.attention(q, q, q, kernel="fav3_sage", layout="bshd", config_dir="configs")
    assert out.shape == q.shape
    (run,) = Path("tuning_runs").iterdir()
    for name in (run_folder.RESULTS, run_folder.METADATA):
        assert json.loads((run / name).read_text())
    again = sage("--from-captures", "--config-dir", "configs")
    assert again.exit_code == 0
    assert "kept" in again.stdout


def test_without_a_folder_the_users_own_is_written(folder, script, tmp_path):
    script(ScriptedRunner())
    assert sage("--from-captures").exit_code == 0
    assert (tmp_path / "user" / "sage_plugin" / SLUG / "attention.json").exists()


def test_progress_is_on_stderr_and_data_on_stdout(folder, script):
    script(ScriptedRunner())
    result = sage("--from-captures", folder, "--min-gain", "0.99")
    assert "default kept" in result.stdout
    assert "entry written" in result.stdout
    assert "No config was surely faster than the default by 99 %." in result.stdout
    assert "3/3" in result.stderr
    assert "3/3" not in result.stdout
    assert "valid" in result.stdout
    assert "valid" not in result.stderr


def test_kernels_spaces_and_limits_reach_the_trials(folder, script):
    Path("space.json").write_text('{"block_size_n": [64, 128, 256], "stage": [1, 2]}')
    runner = script(ScriptedRunner())
    result = sage(
        "--from-captures", "--kernel", "sage", "--kernel", "fav2:emulation", "--config-file",
        "space.json", "--max-trials", "2", "--run-name", "mine", "--min-gain", "0.02",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert len(runner.screened) == 2 * 2 * 2
    assert "'stage' is ignored" in " ".join(result.stderr.split())
    metadata = json.loads(Path("tuning_runs/mine/run_metadata.json").read_text())
    assert metadata["options"]["max_trials"] == 2
    kernels = {study["key"]["kernel"] for study in metadata["studies"]}
    assert kernels == {"sage", "fav2"}


def test_shapes_in_the_older_and_the_short_spelling(script):
    runner = script(ScriptedRunner())
    words = ["--batch-size", "1", "--num-heads", "2", "--head-dim", "32", "--causal"]
    assert sage("--seq-len", "64,128", *words, "--config-dir", "c").exit_code == 0
    short = ["-b", "1", "-hq", "4", "-hk", "2", "-sq", "64", "-sk", "128", "-d", "32", "-causal"]
    result = sage(*short, "--dtype", "fp16", "--layout", "bshd", "--config-dir", "c")
    assert result.exit_code == 0, result.stderr
    assert "Next: sage configs list --config-dir c" in result.stdout
    entries = load.read(Path("c") / SLUG / "attention.json").entries
    found = {
        (e.key.seq_q, e.key.seq_k, e.key.gqa_ratio, e.key.dtype, e.key.layout) for e in entries
    }
    assert found == {
        (64, 64, 1, "bfloat16", "bhsd"),
        (128, 128, 1, "bfloat16", "bhsd"),
        (64, 128, 2, "float16", "bshd"),
    }
    assert all(e.key.causal and e.evidence.synthetic for e in entries)
    assert entries[0].evidence.inputs == ("synthetic:normal:0",)
    assert runner.closed


def test_presets(script):
    result = sage("--preset", "all", "--dtype", "fp16", "--dry-run")
    assert result.exit_code == 0
    assert "2x30 heads of 64" in result.stdout
    assert "17,776 tokens" in result.stdout
    assert sage("--preset", "cogvideox-2b", "--preset", "wan-480p", "--dry-run").exit_code == 0


def test_a_dry_run_writes_nothing(folder):
    before = sorted(Path().rglob("*"))
    result = sage("--from-captures", "--dry-run", "--kernel", "sage")
    assert result.exit_code == 0
    assert "2 captured" not in result.stdout
    assert "1 captured" in result.stdout
    assert "Trials would go to tuning_runs/" in result.stdout
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("kind", ["key_bias", "dense"])
def test_masks_of_synthetic_inputs_have_entries_of_their_own(script, kind):
    script(ScriptedRunner())
    small = ["-sq", "64", "-hq", "2", "-d", "32", "--mask", kind]
    result = sage(*small, "--config-dir", "c")
    assert result.exit_code == 0, result.stderr
    (entry,) = load.read(Path("c") / SLUG / "attention.json").entries
    assert entry.key.mask_kind == kind
    assert f"bhsd {kind}" in result.stdout
    assert f"bf16 bhsd {kind}" in sage("--preset", "wan-480p", "--mask", kind, "--dry-run").stdout


def test_masked_captures_are_tuned_for_real(tmp_path):
    captures.write(tmp_path / "captured_inputs", [(MASKED, (0, 1)), (DENSE, (1,))])
    result = sage("--from-captures", "--config-dir", "c", "--max-trials", "2")
    assert result.exit_code == 0, result.stdout + result.stderr
    entries = load.read(Path("c") / SLUG / "attention.json").entries
    assert {entry.key.mask_kind for entry in entries} == {"key_bias", "dense"}


def test_a_damaged_capture_is_left_out_and_all_damaged_ones_are_exit_2(tmp_path, script):
    script(ScriptedRunner())
    folder = captures.write(tmp_path / "captured_inputs", [(SELF, (0,)), (SELF, (1,))])
    captures.damage(folder, 0)
    result = sage("--from-captures", "--config-dir", "c")
    assert result.exit_code == 0, result.stderr
    assert "left out: 000000.safetensors does not match its checksum" in result.stderr
    captures.damage(folder, 1)
    every = sage("--from-captures", "--config-dir", "c")
    assert every.exit_code == 2
    assert "no capture is sound: 2 captures are damaged" in " ".join(every.stderr.split())


def test_captures_that_cannot_be_tuned_are_named(tmp_path):
    captures.write(tmp_path / "wide", [(WIDE, (0,))])
    result = sage("--from-captures", "wide")
    assert result.exit_code == 2
    assert "head dim 264" in result.stderr
    captures.write(tmp_path / "both", [(WIDE, (0,)), (SELF, (0,))])
    some = sage("--from-captures", "both", "--dry-run")
    assert some.exit_code == 0
    assert "left out" in some.stdout


def test_exit_1_where_nothing_passes_and_4_where_some_keys_fail(folder, script):
    script(ScriptedRunner(fails=Everything()))
    nothing = sage("--from-captures", "--config-dir", "c")
    assert nothing.exit_code == 1
    assert "gate_failed" in nothing.stderr
    assert not list(Path("c").rglob("*.json"))
    script(FailsForGrouped())
    some = sage("--from-captures", "--config-dir", "c", "--fresh")
    assert some.exit_code == 4
    assert "failed" in some.stdout
    assert len(load.read(Path("c") / SLUG / "attention.json").entries) == 1


class Everything(dict):
    """Every config fails its gate."""

    def get(self, key, default=None):
        return "gate_failed"


class FailsForGrouped(ScriptedRunner):
    """Every config of the grouped call fails its gate."""

    def judge(self, study, config):
        self.fails = Everything() if study.key.gqa_ratio == 2 else {}
        return super().judge(study, config)


def test_exit_130_after_ctrl_c_with_the_command_that_goes_on(folder, script, monkeypatch):
    def press(count: int) -> None:
        if count == 4:
            raise KeyboardInterrupt

    argv = ["sage", "tune", "--from-captures", "a folder", "--fresh"]
    monkeypatch.setattr(tune_command.sys, "argv", argv)
    script(ScriptedRunner(before=press))
    result = sage("--from-captures", "--config-dir", "c")
    assert result.exit_code == 130
    assert "1 of 2 calls to go. Next: sage tune --from-captures 'a folder'" in result.stdout
    assert len(load.read(Path("c") / SLUG / "attention.json").entries) == 1


@pytest.mark.parametrize(
    ("text", "value"), [("600", 600), ("90s", 90), ("10m", 600), ("1.5h", 5400)]
)
def test_durations(text, value):
    assert tune_options.seconds(text) == value


def test_bad_durations():
    for text in ("", "ten", "10d", "-5", "1e3"):
        with pytest.raises(UsageError):
            tune_options.seconds(text)


def test_tuning_on_captures_imports_no_host_library(folder):
    code = (
        "import sys; from sage_plugin.cli import app\n"
        "app(['tune', '--from-captures', '--dry-run'], standalone_mode=False)\n"
        "import sage_plugin.tune.configs.trial, sage_plugin.tune.configs.subprocess_runner\n"
        "print('hosts', sorted({'diffusers', 'transformers'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.endswith("hosts []\n"), done.stderr
