"""`sage demo` from end to end on a short clip, and how each mistake is answered."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from PIL import Image
from typer.testing import CliRunner

from sage_plugin import device
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.cli import app, demo_run
from sage_plugin.demo.sizes import SIZES
from sage_plugin.kernels.attention import dispatch
from sage_plugin.registry import load

FRAMES, STEPS, LAYERS = 8, 2, 4
SHORT = dataclasses.replace(SIZES["small"], frames=FRAMES)
STEP_MARKS = [f"{n}." for n in range(1, 7)]
FILES = {
    ".sage-demo",
    "captured_inputs",
    "configs",
    "tuning_runs",
    "bench.csv",
    "bench.json",
    "summary.txt",
    *(f"{clip}.{kind}" for clip in ("host", "patched", "side_by_side") for kind in ("gif", "png")),
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """A short clip, few captures, and nothing from the user's environment."""
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setitem(SIZES, "small", SHORT)
    monkeypatch.setattr(demo_run, "CAPTURES", 2)
    monkeypatch.setattr(demo_run, "BENCHED", 1)
    monkeypatch.setattr(demo_run, "TUNE_BUDGET_S", 2.0)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    dispatch.forget()
    yield
    dispatch.forget()
    root.handlers[:], root.level = handlers, level


def demo(*words: object):
    arguments = ["demo", "--size", "small", "--steps", str(STEPS), "--device", "cpu"]
    return CliRunner().invoke(app, [*arguments, *map(str, words)], env={"COLUMNS": "160"})


def test_the_whole_path(tmp_path):
    out = tmp_path / "out"
    result = demo("--out", out)
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in out.iterdir()} == FILES

    for clip, width in (("host", 1), ("patched", 1), ("side_by_side", 3)):
        with Image.open(out / f"{clip}.gif") as film:
            assert film.n_frames == FRAMES
            assert film.size == (width * SHORT.width * 2, SHORT.height * 2)

    captures = open_captures(out / "captured_inputs")
    assert len(captures.records) == 2
    assert {r.shape.seq_q for r in captures.records} == {SHORT.tokens}
    facts = device.facts("cpu")
    registry = load.read(out / "configs" / facts.slug / "attention.json")
    assert registry.device == facts
    (entry,) = registry.entries
    assert (entry.key.kernel, entry.key.variant) == ("fav3_sage", "emulation")
    assert entry.key.seq_q == SHORT.tokens
    assert not entry.evidence.synthetic
    found = dispatch.find_launch(entry.key, facts, config_dir=str(out / "configs"))
    assert (found.source, found.config) == ("exact", entry.config)

    calls = LAYERS * STEPS
    summary = (out / "summary.txt").read_text()
    assert f"{calls} of {calls} attention calls ran on fav3_sage" in summary
    assert "not a speed" in summary
    assert "dB PSNR" in summary
    assert summary.splitlines()[0] in result.stdout
    (table,) = json.loads((out / "bench.json").read_text())["tables"]
    kernels = {row["kernel"] for row in table["rows"]}
    assert kernels == {"sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8"}
    steps = [line.split(":")[0] for line in result.stdout.splitlines() if line[:2] in STEP_MARKS]
    assert steps == [
        "1. Load",
        "2. Generate",
        "3. Record",
        "4. Tune",
        "5. Measure",
        "6. Generate again",
    ]
    assert result.stdout.splitlines()[-1].startswith("Next: sage bench ")


@pytest.fixture
def quick(monkeypatch):
    """Leave tuning and measuring out, which the whole path shows, and keep the rest."""
    from sage_plugin.cli import demo as command

    monkeypatch.setattr(command, "_tune", lambda ask: (ask.folder / "configs").mkdir())
    monkeypatch.setattr(command, "_measure", lambda ask: [])


@pytest.mark.usefixtures("quick")
def test_a_second_run_replaces_the_first(tmp_path):
    out = tmp_path / "out"
    assert demo("--out", out, "--seed", 1).exit_code == 0
    first = (out / "host.png").read_bytes()
    (out / "of_the_first_run").touch()
    assert demo("--out", out, "--seed", 7).exit_code == 0
    assert (out / "host.png").read_bytes() != first
    assert not (out / "of_the_first_run").exists()


@pytest.mark.usefixtures("quick")
def test_a_kernel_by_name_is_what_runs(tmp_path):
    result = demo("--out", tmp_path / "out", "--kernel", "qk_int8")
    assert result.exit_code == 0, result.stderr
    calls = LAYERS * STEPS
    assert f"{calls} of {calls} attention calls ran on sage with" in result.stdout
    assert "sage:emulation" in result.stdout


@pytest.mark.usefixtures("quick")
def test_a_policy_takes_the_place_of_the_kernel(tmp_path):
    rules = [{"kernel": "sdpa", "steps": ":1"}, {"kernel": "sage"}]
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"schema_version": 1, "rules": rules}))
    result = demo("--out", tmp_path / "out", "--policy", policy)
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert f"{LAYERS} of {LAYERS * STEPS} attention calls ran on kernels by the policy" in text
    assert f"rule 1 x{LAYERS} at steps 0 (not on a kernel)" in text
    assert f"rule 2 x{LAYERS} at steps 1" in text
    assert "fav3_sage:emulation" not in text


@pytest.mark.usefixtures("quick")
def test_a_policy_that_fits_no_layer_is_refused_before_anything_is_drawn(tmp_path):
    rules = [{"kernel": "sage", "layers": ["*blocks.29.*"]}]
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"schema_version": 1, "rules": rules}))
    result = demo("--out", tmp_path / "out", "--policy", policy)
    assert result.exit_code == 2
    assert "rule 1 of the policy names no layer of this model" in result.stderr
    assert "2. Generate" not in result.stdout


def test_the_mean_step_counts_slow_ones_that_the_median_hides():
    import torch

    clip = demo_run.Clip(torch.zeros(1), (9.0, 1.0, 2.0))
    assert (clip.mean_step_ms, clip.median_step_ms) == (4.0, 2.0)


@pytest.mark.usefixtures("quick")
def test_the_patched_clip_is_near_the_hosts_and_not_the_same(tmp_path):
    result = demo("--out", tmp_path / "out")
    line = next(line for line in result.stdout.splitlines() if "dB PSNR" in line)
    psnr = float(line.split(" by ")[1].split(" dB")[0])
    assert 20 < psnr < 90
    host, patched = (
        (tmp_path / "out" / f"{name}.png").read_bytes() for name in ("host", "patched")
    )
    assert host != patched


@pytest.mark.usefixtures("quick")
def test_a_patched_run_without_a_kernel_call_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "1")
    result = demo("--out", tmp_path / "out")
    assert result.exit_code == 1
    assert f"error: none of the {LAYERS * STEPS} attention calls" in result.stderr
    assert "SAGE_PLUGIN_DISABLE" in result.stderr
    assert "6. Generate again" not in result.stdout
    assert not (tmp_path / "out" / "summary.txt").exists()


# -- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--kernel", "flash"), 2, "kernel 'flash' is not known; choose one of auto, torch, sdpa"),
        (("--kernel", "sage:cuda"), 2, "variant 'cuda' of kernel 'sage' is not known"),
        (("--kernel", "sage:portable"), 2, "'portable' of kernel 'sage' needs a GPU: on a CPU"),
        (("--seed", "9" * 26), 2, "--seed 99999999999999999999999999: must be from 0 to"),
        (("--kernel", "sdpa"), 2, "--kernel 'sdpa' has nothing to tune; choose fav2"),
        (("--kernel", "torch"), 2, "--kernel 'torch' has nothing to tune"),
        (("--size", "huge"), 2, "--size 'huge': allowed are small, large"),
        (("--device", "tpu"), 2, "--device 'tpu': allowed are cuda and cpu"),
        (("--steps", "1"), 2, "--steps"),
        (("--digit", "10"), 2, "--digit"),
        (("--policy", "no.json"), 2, "neither a file nor one of fast, balanced, safe"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_made(tmp_path, words, code, said):
    result = demo("--out", tmp_path / "out", *words)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_there_is_exit_code_3(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = demo("--out", tmp_path / "out", "--device", "cuda")
    assert result.exit_code == 3
    assert "no GPU that torch can use" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    for out in (theirs, theirs / "thesis.txt", tmp_path):
        result = demo("--out", out)
        assert result.exit_code == 2
        assert "not the folder of an earlier `sage demo`: name another with --out" in result.stderr
    assert [path.name for path in theirs.iterdir()] == ["thesis.txt"]
    assert (theirs / "thesis.txt").read_text() == "years of work"


def test_an_unwritable_place_is_exit_code_3(tmp_path):
    (tmp_path / "file").touch()
    result = demo("--out", tmp_path / "file" / "below")
    assert result.exit_code == 3
    assert "cannot be written" in result.stderr


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    demo_run.prepare_folder(tmp_path / "empty")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [demo_run.MARK]
    demo_run.prepare_folder(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / demo_run.MARK).is_file()
