"""`sage demo` from end to end on a short clip."""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest
from PIL import Image

from sage_plugin import device
from sage_plugin.bench.clips.draw import Drawn
from sage_plugin.bench.clips.run_config import RunConfig
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.cli import demo as command
from sage_plugin.cli import output_folder
from sage_plugin.demo.sizes import SIZES
from sage_plugin.kernels.attention import dispatch
from sage_plugin.registry import load
from tests.cli.program import sage
from tests.short import FRAMES, keep_short

STEPS, LAYERS = 2, 4
SHORT = dataclasses.replace(SIZES["small"], frames=FRAMES)
STEP_MARKS = [f"{n}." for n in range(1, 7)]
FILES = {
    *(".sage-demo", "captured_inputs", "configs", "tuning_runs", "bench.csv", "bench.json"),
    *("summary.txt", "side_by_side.gif", "side_by_side.png"),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """A short clip, and few captures."""
    monkeypatch.setattr(command, "CAPTURES", 2)
    monkeypatch.setattr(command, "BENCHED", 1)
    monkeypatch.setattr(command, "TUNE_BUDGET_S", 2.0)
    keep_short(monkeypatch)


def demo(*words: object):
    arguments = ("--size", "small", "--num-inference-steps", STEPS, "--device", "cpu")
    return sage("demo", *arguments, *words)


def test_the_whole_path(tmp_path):
    out = tmp_path / "out"
    result = demo("--out", out)
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in out.iterdir()} == FILES

    with Image.open(out / "side_by_side.gif") as film, Image.open(out / "side_by_side.png") as png:
        assert film.n_frames == FRAMES
        assert film.size == (3 * (6 * SHORT.width + 6), 6 * SHORT.height + 22)  # and a difference
        assert png.size == (8 * (2 * SHORT.width + 6), 3 * (2 * SHORT.height + 22))

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
    said = ("Load", "Generate", "Record", "Tune", "Measure", "Generate again")
    assert steps == [f"{number}. {words}" for number, words in enumerate(said, start=1)]
    assert [line.strip() for line in result.stdout.splitlines()[-4:]] == [
        "Next, your own pipeline, on a GPU this time with a speed:",
        "sage_plugin.patch(pipe)",
        "pipe(...)  # as before",
        "print(sage_plugin.report(pipe).text())",
    ]


@pytest.fixture
def quick(monkeypatch):
    """Leave tuning and measuring out, which the whole path shows, and keep the rest."""
    monkeypatch.setattr(command._Demo, "tune", lambda run: run.configs.mkdir())
    monkeypatch.setattr(command._Demo, "measure", lambda run: [])


@pytest.mark.usefixtures("quick")
def test_a_second_run_replaces_the_first_and_each_runs_its_kernel(tmp_path):
    out = tmp_path / "out"
    first = demo("--out", out)
    line = next(line for line in first.stdout.splitlines() if "dB PSNR" in line)
    psnr = float(line.split(" to ")[1].split(" dB")[0])
    assert 20 < psnr < 90, "near the host's clip, and not the same"
    clip = (out / "side_by_side.png").read_bytes()
    (out / "of_the_first_run").touch()
    second = demo("--out", out, "--seed", 7, "--kernel", "qk_int8")
    assert second.exit_code == 0, second.stderr
    calls = LAYERS * STEPS
    assert f"{calls} of {calls} attention calls ran on sage with" in second.stdout
    assert "sage:emulation" in second.stdout
    assert (out / "side_by_side.png").read_bytes() != clip
    assert not (out / "of_the_first_run").exists()


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
def test_a_patched_run_without_a_kernel_call_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "1")
    result = demo("--out", tmp_path / "out")
    assert result.exit_code == 1
    assert f"error: none of the {LAYERS * STEPS} attention calls" in result.stderr
    assert "SAGE_PLUGIN_DISABLE" in result.stderr
    assert "6. Generate again" not in result.stdout
    assert not (tmp_path / "out" / "summary.txt").exists()


def test_an_empty_folder_is_taken(tmp_path):
    for folder in (tmp_path / "empty", tmp_path / "new" / "deep"):
        output_folder.prepare(folder, marker=command.MARKER, command="sage demo")
        assert [path.name for path in folder.iterdir()] == [command.MARKER]


def drawn(*steps_ms):
    return Drawn(np.zeros(1), (), steps_ms, None)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (None, "A step takes 2.00 ms instead of 20 ms."),
        ("a policy", "A step takes 4.00 ms instead of 20 ms in the mean of the run."),
    ],
)
def test_the_mean_step_of_a_policy_counts_slow_ones_that_a_median_hides(tmp_path, policy, said):
    run = command._Demo(tmp_path, types.SimpleNamespace(type="cuda"), None, "sage:hopper", 3)
    table = types.SimpleNamespace(rows=())
    config = RunConfig("patched", policy=policy)
    assert run._speed(config, drawn(20.0, 20.0), drawn(9.0, 1.0, 2.0), [table]) == said
