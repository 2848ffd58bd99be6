"""`examples/cogvideo/compare.py`: what it measures, and what it writes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
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


def test_quality_of_known_frames(quality: ModuleType) -> None:
    rng = np.random.default_rng(0)
    clip = rng.random((3, 16, 16, 3), dtype=np.float32) * 0.8
    moved = clip.copy()
    moved[1] += 0.1
    found = quality.quality(moved, clip)
    assert found.psnr_db[0] == found.psnr_db[2] == math.inf
    assert found.psnr_db[1] == pytest.approx(20.0, abs=1e-4)  # mse 0.01
    assert found.ssim[0] == 1.0
    assert found.ssim[1] < 1.0
    assert found.mean_ssim == pytest.approx(sum(found.ssim) / 3)
    grey = quality.quality(clip[..., :1], clip[..., :1])
    assert grey.mean_psnr_db == math.inf
