"""The demo pipeline: shapes, determinism, guidance, and that a person could read the digits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import FlowMatchEulerDiscreteScheduler

from sage_plugin.demo.model import build_model, shipped_folder
from sage_plugin.demo.pipeline import DigitVideoPipeline, load_pipeline
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import UsageError
from tests.script import loaded

TINY = replace(SIZES["small"], frames=2)
needs_weights = pytest.mark.skipif(
    not (shipped_folder() / "model.safetensors").exists(), reason="the weights are not trained yet"
)


@pytest.fixture(scope="module")
def pipe() -> DigitVideoPipeline:
    """A pipeline with random weights."""
    torch.manual_seed(0)
    model = build_model()
    scheduler = FlowMatchEulerDiscreteScheduler(**model.config["scheduler"])
    pipe = DigitVideoPipeline(model.transformer.eval(), model.label_embedding, scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: DigitVideoPipeline, seed: int = 0, **options: Any) -> Any:
    options = {"digit": 3, "size": TINY, "num_inference_steps": 2} | options
    return pipe(generator=torch.Generator().manual_seed(seed), **options).frames


def test_same_seed_same_clip(pipe: DigitVideoPipeline) -> None:
    first = run(pipe)
    assert torch.equal(first, run(pipe))
    assert not torch.equal(first, run(pipe, seed=1))
    assert not torch.equal(first, run(pipe, digit=4))


def test_output_types_hold_the_same_pixels(pipe: DigitVideoPipeline) -> None:
    pixels = run(pipe, digit=[1, 2])
    assert pixels.shape == (2, 2, 1, 48, 48)
    assert pixels.dtype == torch.float32
    assert 0 <= pixels.min() <= pixels.max() <= 1
    arrays = run(pipe, digit=[1, 2], output_type="np")
    assert arrays.shape == (2, 2, 48, 48, 1)
    torch.testing.assert_close(torch.from_numpy(arrays)[..., 0], pixels[:, :, 0])
    clips = run(pipe, digit=[1, 2], output_type="pil")
    assert [len(clip) for clip in clips] == [2, 2]
    assert clips[1][0].getpixel((7, 5)) == round(float(pixels[1, 0, 0, 5, 7]) * 255)


@pytest.mark.parametrize(("guidance", "expected"), [(1.0, 2), (2.0, 4)])
def test_guidance_doubles_the_batch(
    pipe: DigitVideoPipeline, guidance: float, expected: int
) -> None:
    seen: list[tuple[int, int]] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((len(kwargs["hidden_states"]), kwargs["encoder_hidden_states"].shape[1]))

    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    run(pipe, digit=[5, 6], guidance_scale=guidance)
    handle.remove()
    assert seen == [(expected, 8)] * 2


def test_steps_are_shifted_towards_noise_and_end_at_the_clip(pipe: DigitVideoPipeline) -> None:
    steps: list[float] = []
    states: list[torch.Tensor] = []

    def note(_: object, index: int, timestep: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        assert index == len(steps)
        steps.append(float(timestep))
        states.append(state["latents"])

    frames = run(pipe, num_inference_steps=4, callback_on_step_end=note)
    even = [1.0, 0.75, 0.5, 0.25]
    assert steps == pytest.approx([1000 * 4 * t / (1 + 3 * t) for t in even], rel=1e-5)
    torch.testing.assert_close((states[-1] / 2 + 0.5).clamp(0, 1), frames)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digit": 10}, r"digit is \[10\]; pass one digit 0..9"),
        ({"digit": []}, r"digit is \[\]"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0; pass 1 or more"),
        ({"output_type": "latent"}, "output_type is 'latent'; pass one of pt, np, pil"),
    ],
)
def test_bad_requests(pipe: DigitVideoPipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(pipe, **options)


@needs_weights
def test_generated_digits_can_be_read() -> None:
    """All ten digits at the shipped size and default steps; the slow test of this folder."""
    pytest.importorskip("sklearn")
    digits = loaded("demo_digits")
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    # A quarter of the length, a sixteenth of the attention.
    size = replace(SIZES["small"], frames=4)
    frames = run(pipe, digit=list(range(10)), size=size, num_inference_steps=6)
    read = digits.read_digits(frames, size, digits.load_glyphs())
    assert (read == torch.arange(10)).sum() >= 8
    background = frames.flatten(2).median(-1).values
    assert background.max() < 0.1
