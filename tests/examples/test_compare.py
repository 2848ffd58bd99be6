"""`examples/cogvideo/compare.py`: what it measures, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

pytest.importorskip("diffusers")

FRAMES, LAYERS = 8, 4
SHORT = ["--num-frames", str(FRAMES), "--output", "out"]


def run(compare: ModuleType, *options: str) -> int:
    return compare.generate.main(options, options_of=compare.parser, run=compare.compare)


def test_kernels_and_a_policy_are_compared_with_the_unpatched_clip(
    compare: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rules = [{"kernel": "sdpa", "steps": ":1"}, {"kernel": "sage"}]
    runs = [
        {"name": "sdpa", "ms": 8.0, "error": 0.0},
        {"name": "policy", "ms": 6.5, "error": 0.125},
    ]
    prediction = {"device": "H100", "steps": 2, "calls": 2 * LAYERS, "runs": runs}
    policy = {"schema_version": 1, "rules": rules, "prediction": prediction}
    Path("policy.json").write_text(json.dumps(policy))
    options = ["--kernels", "sdpa,sage", "--policy", "policy.json", "--num-inference-steps", "2"]
    assert run(compare, *options, *SHORT) == 0
    said = capsys.readouterr()
    assert "drawing with policy (4 of 4)" in said.err
    assert "Nothing was timed, since kernels are emulated on a CPU" in said.out
    assert "predicted for H100, and this is CPU" in said.out
    (line,) = (x for x in said.out.splitlines() if x.startswith("policy") and "6.5" in x)
    assert line.split()[1:4] == ["1.5", "6.5", "0.12500"]

    found = json.loads(Path("out/result.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["unpatched", "sdpa", "sage", "policy"]
    same, sage, ours = rows["sdpa"], rows["sage"], rows["policy"]
    assert (same["mean_psnr_db"], same["min_ssim"], same["kernel_calls"]) == ("inf", 1.0, 0)
    assert 20 < sage["min_psnr_db"] <= sage["mean_psnr_db"] < 80
    assert 0.9 < sage["min_ssim"] <= sage["mean_ssim"] < 1
    assert sage["kernel_calls"] == sage["attention_calls"] == 2 * LAYERS
    assert len(sage["quality"]["psnr_db"]) == FRAMES
    assert 0.0 == ours["step_error"][0] < ours["step_error"][1] < sage["step_error"][1]
    by_host = "host: the policy's rule 1 leaves it to the host"
    assert ours["ran"] == {by_host: LAYERS, "sage:emulation": LAYERS}
    assert (ours["predicted_saved_ms"], ours["predicted_error"]) == (1.5, 0.125)
    assert Image.open("out/side_by_side.gif").n_frames == FRAMES
    assert Image.open("out/side_by_side.png").height > 7 * 96  # a row a clip and a difference
    assert Image.open("out/plane.png").format == "PNG"


def test_a_pipeline_of_diffusers(compare: ModuleType, tiny_cogvideox: Path) -> None:
    options = ["--model", str(tiny_cogvideox), "--prompt", "a", "--kernels", "sage"]
    options += ["--num-inference-steps", "2", "--num-frames", "9", "--height", "64"]
    assert run(compare, *options, "--width", "64", "--output", "out") == 0
    _, sage = json.loads(Path("out/result.json").read_text())["rows"]
    assert len(sage["step_error"]) == 2


def test_a_pipeline_that_tells_no_latents_is_compared_without_drift(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing = compare.generate.draw
    monkeypatch.setattr(compare.generate, "draw", lambda pipe, inputs, _: drawing(pipe, inputs))
    assert run(compare, "--kernels", "sage", "--num-inference-steps", "1", *SHORT) == 0
    _, sage = json.loads(Path("out/result.json").read_text())["rows"]
    assert sage["step_error"] == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--kernels", "sdpa,fastest"], "fav3_sage"),
        (["--model", "./missing", "--prompt", "a cat"], "--model demo"),
        (["--policy", "missing.json"], "fast, balanced, safe"),
    ],
)
def test_a_refusal_is_one_sentence(
    compare: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], word: str
) -> None:
    assert run(compare, *options) == 2
    assert word in capsys.readouterr().err.strip().splitlines()[-1]
