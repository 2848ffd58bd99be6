"""`examples/cogvideo/compare.py`: what it measures, and what it writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

pytest.importorskip("diffusers")

FRAMES, LAYERS = 8, 4


def test_kernels_are_compared_with_the_unpatched_clip(
    compare: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--kernels", "sdpa,fav3_sage", "--num-frames", str(FRAMES), "--budget", "0.1"]
    assert compare.main([*options, "--num-inference-steps", "1", "--output", "out"]) == 0
    said = capsys.readouterr()
    assert "drawing with fav3_sage (3 of 3)" in said.err
    assert "emulation: not a speed" in said.out
    assert "inf dB" in said.out

    found = json.loads(Path("out/metrics.json").read_text())
    same, ours = found["quality"]["sdpa"], found["quality"]["fav3_sage"]
    assert (same["mean_psnr_db"], same["min_ssim"], same["kernel_calls"]) == ("inf", 1.0, 0)
    assert 20 < ours["min_psnr_db"] <= ours["mean_psnr_db"] < 80
    assert 0.9 < ours["min_ssim"] <= ours["mean_ssim"] < 1
    assert ours["kernel_calls"] == ours["attention_calls"] == LAYERS
    assert found["command"].startswith("compare.py --kernels sdpa,fav3_sage")
    steps = {row["name"]: row for row in found["steps"]["rows"]}
    assert steps["fav3_sage"]["time"] is None
    assert steps["fav3_sage"]["ran"] == {"fav3_sage:emulation": LAYERS}
    assert steps["unpatched"]["time"]["median_ms"] > 0

    lines = list(csv.DictReader(Path("out/frames.csv").read_text().splitlines()))
    assert len(lines) == 2 * FRAMES
    assert {line["psnr_db"] for line in lines if line["kernel"] == "sdpa"} == {"inf"}
    theirs = [float(line["psnr_db"]) for line in lines if line["kernel"] == "fav3_sage"]
    assert min(theirs) == pytest.approx(ours["min_psnr_db"])
    assert Image.open("out/side_by_side.gif").n_frames == FRAMES
    assert Image.open("out/sheet.png").height > 4 * 192  # a row a clip and a difference


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
    assert compare.main(options) == 2
    assert word in capsys.readouterr().err.strip().splitlines()[-1]


def test_all_kernels_of_the_device_by_default(compare: ModuleType) -> None:
    import torch

    expected = ["sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8"]
    assert compare._kernels(None, torch.device("cpu")) == expected
    assert compare._kernels("qk_int8, sage:emulation,qk_int8", torch.device("cpu")) == [
        "qk_int8",
        "sage:emulation",
    ]


def test_a_policy_is_proved_beside_the_kernels(
    compare: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [{"kernel": "sdpa", "steps": ":1"}, {"kernel": "sage"}]
    ways = [
        {"way": "sdpa", "ms": 8.0, "error": 0.0},
        {"way": "sage", "ms": 5.0, "error": 0.25},
        {"way": "policy", "ms": 6.5, "error": 0.125},
    ]
    foreseen = {"device": "H100", "steps": 2, "calls": 2 * LAYERS, "ways": ways}
    Path("policy.json").write_text(
        json.dumps({"schema_version": 1, "rules": rules, "prediction": foreseen})
    )
    options = ["--kernels", "sage", "--policy", "policy.json", "--num-frames", str(FRAMES)]
    options += ["--budget", "0.1", "--num-inference-steps", "2", "--output", "out"]
    assert compare.main(options) == 0
    said = capsys.readouterr()
    assert "drawing with policy (3 of 3)" in said.err
    assert "Nothing was timed, since kernels are emulated on a CPU" in said.out
    assert "foreseen on H100, and this is CPU" in said.out
    (line,) = (x for x in said.out.splitlines() if x.startswith("policy") and "6.5" in x)
    assert line.split()[-4:] == ["-", "1.5", "6.5", "0.12500"]

    found = json.loads(Path("out/metrics.json").read_text())["quality"]
    assert found["policy"]["kernel_calls"] == LAYERS  # the second of two steps
    assert found["policy"]["step_error"][0] == 0.0
    assert 0 < found["policy"]["step_error"][1] < found["sage"]["step_error"][1]
    proof = json.loads(Path("out/result.json").read_text())
    rows = {row["name"]: row for row in proof["rows"]}
    assert list(rows) == ["unpatched", "sage", "policy"]
    by_host = "host: the policy's rule 1 leaves it to the host"
    assert rows["policy"]["ran"] == {by_host: LAYERS, "sage:emulation": LAYERS}
    assert rows["policy"]["foreseen_saved_ms"] == 1.5
    assert rows["policy"]["foreseen_error"] == 0.125
    assert Image.open("out/plane.png").format == "PNG"
    lines = Path("out/frames.csv").read_text().splitlines()
    assert sum(line.startswith("policy,") for line in lines) == FRAMES


def test_a_pipeline_that_tells_no_latents_is_compared_without_curves(
    compare: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing = compare.clip_model.draw
    monkeypatch.setattr(
        compare.clip_model, "draw", lambda pipe, request, on_step: drawing(pipe, request)
    )
    options = ["--kernels", "sage", "--num-frames", "4", "--budget", "0.1"]
    assert compare.main([*options, "--num-inference-steps", "1", "--output", "out"]) == 0
    assert "not told by the pipeline" in capsys.readouterr().out
    quality = json.loads(Path("out/metrics.json").read_text())["quality"]
    assert quality["sage"]["step_error"] == []
    assert not Path("out/result.json").exists()


def test_the_curve_of_a_pipeline_of_diffusers(
    compare: ModuleType, tiny_cogvideox: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_cogvideox), "--prompt", "a", "--kernels", "sage"]
    options += ["--num-inference-steps", "2", "--num-frames", "9", "--height", "64"]
    assert compare.main([*options, "--width", "64", "--budget", "0.1", "--output", "out"]) == 0
    quality = json.loads(Path("out/metrics.json").read_text())["quality"]
    assert len(quality["sage"]["step_error"]) == 2
