"""Clips of the embedded model that `sage demo` and `sage policy` draw, and their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.options import check_seed, one_of
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.clips.draw import Frames, OnStep, Subject
    from sage_plugin.plugin.policy.rules import Policy

MODEL = "CogVideoXTransformer3DModel"
"""Class of the embedded model, as policies name it."""

Size = Annotated[
    str | None, typer.Option(help="small or large (default: large on a GPU, small on a CPU).")
]
Digits = Annotated[
    list[int] | None,
    typer.Option("--digit", min=0, max=9, help="Digit to draw, repeatable (default 7)."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--num-inference-steps",
        "--steps",
        min=1,
        help="Denoising steps (default: those of the policy's search, or 15).",
    ),
]


@dataclass(frozen=True, slots=True)
class ClipOptions:
    """The options that choose a clip."""

    size: Size = None
    digit: Digits = None
    num_inference_steps: Steps = None
    seed: Annotated[int, typer.Option(help="Of the starting noise and of the order of timing.")] = 0

    @property
    def digits(self) -> tuple[int, ...]:
        """What is drawn, a clip each."""
        return tuple(self.digit or (7,))

    def size_on(self, device: torch.device) -> str:
        """Return the size that was asked for, or the device's."""
        check_seed(self.seed)
        default = "small" if device.type == "cpu" else "large"
        return one_of("--size", self.size or default, tuple(SIZES))

    def subject(self, device: torch.device, steps: int, config_dir: Path | None) -> Subject:
        """Load the embedded model, and say how it draws: bf16 on a GPU, fp32 on a CPU."""
        import numpy as np
        import torch

        from sage_plugin.bench.clips.draw import Subject
        from sage_plugin.demo import load_pipeline

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        pipe = load_pipeline(device=device, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)

        def draw(on_step: OnStep) -> Frames:
            output = pipe(
                list(self.digits),
                size=SIZES[self.size_on(device)],
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(self.seed),
                output_type="np",
                callback_on_step_end=lambda _pipe, _step, _time, at: on_step(at["latents"]),
            )
            frames: Frames = np.concatenate(list(output.frames))  # the clips one after the other
            return frames

        return Subject(pipe, draw, device, config_dir=config_dir)


def labels(kernels: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Write kernels with their variants as options name them."""
    return tuple(name if variant == "auto" else f"{name}:{variant}" for name, variant in kernels)


def checked_policy(text: str) -> Policy:
    """Return a policy that is not of another model than the embedded one."""
    from sage_plugin.plugin.policy.rules import chosen

    policy = chosen(text)
    if policy.model not in ("", MODEL):
        raise UsageError(
            f"{text} is for {policy.model}, and the embedded model is {MODEL}: prove it on its own "
            f"model with examples/cogvideo/compare.py --model ID --policy {text}"
        )
    return policy
