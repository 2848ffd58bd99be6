"""`examples/cogvideo/generate.py`: clips with a report, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import imageio.v3 as iio
import pytest
import torch

from sage_plugin.errors import UsageError

pytest.importorskip("diffusers")

BRIEF = ["--num-frames", "8", "--num-inference-steps", "1"]
LAYERS = 4


def test_a_clip_on_a_kernel_ends_in_a_video_and_a_report(
    generate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--prompt", "7", "--kernel", "sage", *BRIEF]) == 0
    out = capsys.readouterr().out
    assert f"{LAYERS} of {LAYERS} attention calls in {LAYERS} layers ran on a kernel" in out
    assert f"{LAYERS} on sage:emulation" in out
    assert "Wrote video.mp4: 8 frames" in out
    film = iio.imread("video.mp4")
    assert film.shape == (8, 192, 192, 3)  # 48 pixels, enlarged
    assert film.std() > 10  # something is drawn


def test_a_policy_chooses_in_place_of_a_kernel(
    generate: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(
        '{"schema_version": 1, "rules": [{"kernel": "fav3_sage", "steps": "1:"}, '
        '{"kernel": "sage", "layers": ["*blocks.0.*"]}]}'
    )
    brief = ["--num-frames", "8", "--num-inference-steps", "2"]
    assert generate.main(["--policy", str(path), *brief]) == 0
    out = capsys.readouterr().out
    assert f"{LAYERS + 1} of {2 * LAYERS} attention calls" in out
    assert f"{LAYERS} on fav3_sage:emulation" in out
    assert "1 on sage:emulation" in out
    assert "3 on the host's attention, no rule of the policy takes it" in out


def test_a_pipeline_from_a_folder(
    generate: ModuleType, tiny_cogvideox: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_cogvideox), "--prompt", "a aa", "--kernel", "fav3_sage"]
    numbers = ["--num-frames", "9", "--height", "256", "--width", "272"]  # 1,042 tokens
    assert generate.main([*options, *numbers, "--num-inference-steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 attention calls in 2 layers ran on a kernel" in out
    assert iio.imread("video.mp4").shape == (9, 256, 272, 3)


def test_a_pipeline_that_makes_no_clips_is_refused(generate: ModuleType) -> None:
    with pytest.raises(UsageError, match="text-to-video"):
        generate.draw(lambda **_: object(), {"prompt": "a", "seed": 0})


def test_the_same_seed_draws_the_same_clip(generate: ModuleType) -> None:
    cpu, options = torch.device("cpu"), generate.parser().parse_args(BRIEF)
    pipe, inputs = generate.load(options, cpu), generate.inputs_from(options, cpu)
    first, second = generate.draw(pipe, inputs), generate.draw(pipe, inputs)
    assert (first == second).all()
    assert (first != generate.draw(pipe, inputs | {"seed": 1})).any()


def test_every_layer_is_reported_on_demand(
    generate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = ["--num-frames", "2", "--num-inference-steps", "1"]
    assert (
        generate.main(["--kernel", "sage", "--layers-report", "--output", "a/b.gif", *brief]) == 0
    )
    out = capsys.readouterr().out
    assert "transformer.transformer_blocks.3.attn1" in out
    assert "shorter than min_seq 1024" in out
    assert f"0 of {LAYERS} calls ran on a kernel" in out
    assert iio.imread("a/b.gif").shape[0] == 2


def test_without_ffmpeg_a_gif_is_written_with_a_sentence(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    assert generate.main(["--num-frames", "2", "--num-inference-steps", "1"]) == 0
    said = capsys.readouterr()
    assert "pip install imageio imageio-ffmpeg" in said.err
    assert "Wrote video.gif: 2 frames" in said.out
    assert not Path("video.mp4").exists()
    assert iio.imread("video.gif").shape[0] == 2


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--model", "./missing", "--prompt", "a cat"], 2, "--model demo"),
        (["--model", "THUDM/CogVideoX-2b", "--prompt", "a cat"], 2, "hf download"),
        (["--model", "THUDM/CogVideoX-2b"], 2, "--prompt is missing"),
        (["--model", "x/y", "--prompt", "a", "--size", "small"], 2, "--height"),
        (["--prompt", "77"], 2, "one digit"),
        (["--prompt", "a cat"], 2, "one digit"),
        (["--height", "64"], 2, "--size"),
        (["--num-frames", "0"], 2, "1 or more"),
        (["--kernel", "fastest"], 2, "fav3_sage"),
        (["--policy", "fastest"], 2, "neither a file nor one of fast, balanced, safe"),
        (["--policy", "fast", "--kernel", "sage"], 2, "a policy names the kernels itself"),
        (["--output", "clip.avi"], 2, ".mp4"),
        (["--device", "moon"], 2, "cuda:1"),
        (["--device", "cuda:77"], 3, "no GPU that torch can use"),
    ],
)
def test_a_refusal_is_one_sentence(
    generate: ModuleType,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    word: str,
) -> None:
    assert generate.main(options) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert word in error


def test_an_output_that_cannot_be_made_is_refused_before_the_run(
    generate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert generate.main(["--output", "file/video.mp4", *BRIEF]) == 3
    assert "cannot be made" in capsys.readouterr().err
