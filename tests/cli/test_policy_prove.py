"""`sage policy prove` on a short clip."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
from PIL import Image
from rich.console import Console

pytest.importorskip("diffusers")
pytest.importorskip("skimage")

from sage_plugin.cli import clip_table
from sage_plugin.cli.clips import ClipOptions
from sage_plugin.cli.policy import prove as policy_prove
from sage_plugin.demo.sizes import SIZES
from tests.bench.clips.comparisons import timed
from tests.cli.program import sage
from tests.short import FRAMES, keep_short

STEPS, LAYERS = 3, 4
SHORT = dataclasses.replace(SIZES["small"], frames=FRAMES)
FILES = {
    ".sage-policy-bench",
    "result.json",
    "plane.png",
    "side_by_side.gif",
    "side_by_side.png",
}
RULES = [
    {"kernel": "sdpa", "steps": ":1"},
    {"kernel": "fav2", "layers": ["*blocks.0.*"]},
    {"kernel": "sage"},
]
PREDICTION = {
    "device": "H100",
    "steps": STEPS,
    "calls": STEPS * LAYERS,
    "runs": [
        {"name": "sdpa", "ms": 80.5, "error": 0.0},
        {"name": "sage", "ms": 50.25, "error": 0.03125},
        {"name": "policy", "ms": 60.5, "error": 0.015625},
    ],
}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    keep_short(monkeypatch)


def prove(*words: object):
    return sage("policy", "prove", *words)


def proof(*words: object):
    return prove("policy.json", "--kernel", "sage", *words)


def write_policy(path="policy.json", **more):
    with open(path, "w") as file:
        json.dump({"schema_version": 1, "rules": RULES, **more}, file)


def test_the_whole_path(tmp_path):
    write_policy(model="CogVideoXTransformer3DModel", prediction=PREDICTION)
    result = proof("--seed", 3)
    assert result.exit_code == 0, result.stderr
    out = tmp_path / "policy_bench"
    assert {path.name for path in out.iterdir()} == FILES
    with Image.open(out / "side_by_side.gif") as film:
        assert film.n_frames == FRAMES
        # The baseline, and two others with their differences.
        assert film.size == (5 * (6 * SHORT.width + 6), 6 * SHORT.height + 22)

    found = json.loads((out / "result.json").read_text())
    facts = [found[name] for name in ("policy", "size", "steps", "seed", "digits")]
    assert facts == ["policy.json", "small", STEPS, 3, [7]]  # the steps of the policy's search
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["sdpa", "sage", "policy"]
    assert rows["sdpa"]["mean_psnr_db"] == "inf"
    assert rows["sdpa"]["step_error"] == [0.0] * STEPS
    sage, ours = rows["sage"], rows["policy"]
    assert 20 < sage["min_psnr_db"] < sage["mean_psnr_db"] < ours["mean_psnr_db"] < 90
    assert 0 < sage["step_error"][0] < sage["step_error"][-1]
    assert ours["step_error"][0] == 0.0 < ours["step_error"][1] < ours["step_error"][2]
    assert len(ours["quality"]["psnr_db"]) == len(ours["quality"]["ssim"]) == FRAMES
    assert ours["ran"] == {
        "host: the policy's rule 1 leaves it to the host": LAYERS,
        "fav2:emulation": 2,
        "sage:emulation": 2 * (LAYERS - 1),
    }
    assert (ours["predicted_ms"], ours["predicted_saved_ms"]) == (60.5, 20.0)
    assert found["gain_over_front_db"] is None

    lines = [line for line in result.stdout.splitlines() if line.startswith("policy ")]
    (line,) = (line for line in lines if "60.5" in line)
    assert line.split()[:4] == ["policy", "20.0", "60.5", "0.01562"]
    # A narrow terminal gets the columns in two tables.
    assert any(f"{2 * LAYERS} of {STEPS * LAYERS}" in line for line in lines)
    assert "emulation: not a speed" in result.stdout
    assert "predicted for H100, and this is CPU" in result.stdout
    assert "Nothing was timed, since kernels are emulated on a CPU" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("Next: ")


def test_all_kernels_of_the_device_by_default_and_steps_as_asked(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(policy_prove, "run", lambda *words: asked.append(words))
    words = ["--digit", 3, "--num-inference-steps", 2, "--budget", 5, "--out", "elsewhere"]
    assert prove("safe", *words).exit_code == 0
    ((policy, kernels, clip, device, _, budget_s, out),) = asked
    assert kernels == ("sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8")
    assert (policy, clip.digits, clip.num_inference_steps, budget_s) == ("safe", (3,), 2, 5.0)
    assert (device.type, clip.size, out.name) == ("cpu", None, "elsewhere")


def test_without_matplotlib_the_plot_is_left_out_and_said(monkeypatch, tmp_path):
    drawn = types.SimpleNamespace(denoisers=lambda configs: None)
    monkeypatch.setattr(ClipOptions, "subject", lambda *_: drawn)
    monkeypatch.setattr("sage_plugin.bench.clips.run.compare_clips", lambda *_, **__: (timed(), {}))
    monkeypatch.setattr("sage_plugin.bench.clips.plot.save", lambda *_: "no plane.png: why")
    write_policy()
    result = proof("--out", "out")
    assert result.exit_code == 0
    assert "no plane.png: why" in result.stderr
    assert not (tmp_path / "out" / "plane.png").exists()
    assert (tmp_path / "out" / "result.json").exists()


def shown(found, width):
    console = Console(width=width, file=None)
    with console.capture() as text:
        console.print(clip_table.render(found, width=width))
    return text.get()


def test_the_table_of_times():
    text = shown(timed(36.2), 160)
    (line,) = (x for x in text.splitlines() if x.startswith("policy") and "36.20" in x)
    cells = "policy 5.000 1.0% 20.0 17.0 7.0 0.25000 36.20 35.70 0.92500 0.90000 16 of 16"
    assert line.split() == cells.split()
    (line,) = (x for x in text.splitlines() if x.startswith("sage") and "40.00" in x)
    assert line.split()[:7] == ["sage", "6.000", "1.0%", "16.0", "-", "-", "-"]
    assert "timing: clean (A/A 1.002)" in text
    assert "median of 5 rounds" in text
    assert "emulation" not in text
    assert "The policy lies 1.2 dB above the front of single kernels." in text
    (line,) = (x for x in text.splitlines() if x.startswith("policy") and "1.6e-02" in x)
    assert line.split() == ["policy", "▅▆▆▇", "2.0e-03", "1.6e-02", "3"]


def test_in_a_narrow_terminal_the_quality_stands_below_the_times():
    text = shown(timed(), 80)
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert sum(line.startswith("run") for line in text.splitlines()) == 3


@pytest.mark.parametrize(
    ("psnr_db", "next_step"),
    [(36.0, "Next: sage_plugin.patch(pipe, policy='p')"), (34.0, "Next: sage policy search")],
)
def test_what_to_do_next(psnr_db, next_step):
    assert policy_prove._advice("p", policy_prove.FOLDER, timed(psnr_db)).startswith(next_step)
