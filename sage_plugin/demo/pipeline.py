"""The text-to-video pipeline of the demo, with a digit where a prompt would be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor

from sage_plugin.demo.model import DigitEmbedding, load_model, rotary_embedding
from sage_plugin.demo.sizes import DemoSize, find_size
from sage_plugin.errors import DemoError, UsageError

DEFAULT_GUIDANCE = 3.0
OUTPUT_TYPES = ("pt", "np", "pil")

StepCallback = Callable[["DigitVideoPipeline", int, torch.Tensor, dict[str, Any]], object]


@dataclass
class DigitVideoOutput(BaseOutput):
    """Generated clips.

    Attributes:
        frames: `pt`: (B, F, 1, H, W) float32 in [0, 1]; `np`: (B, F, H, W, 1); `pil`: a list of
            clips, each a list of greyscale images.
    """

    frames: Any


class DigitVideoPipeline(DiffusionPipeline):
    """Generates clips of bouncing digits by flow matching, directly in pixels.

    Each denoising step is one call of diffusers' `CogVideoXTransformer3DModel`; with guidance the
    batch is doubled (empty labels first), as in `CogVideoXPipeline`.
    """

    model_cpu_offload_seq = "label_embedding->transformer"

    def __init__(
        self,
        transformer: CogVideoXTransformer3DModel,
        label_embedding: DigitEmbedding,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        """Assemble a pipeline from its parts; `load_pipeline` does it with the shipped weights."""
        super().__init__()
        self.register_modules(
            transformer=transformer, label_embedding=label_embedding, scheduler=scheduler
        )

    @torch.no_grad()
    def __call__(
        self,
        digit: int | Sequence[int],
        size: str | DemoSize = "small",
        num_inference_steps: int | None = None,
        guidance_scale: float = DEFAULT_GUIDANCE,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pt",
        callback_on_step_end: StepCallback | None = None,
    ) -> DigitVideoOutput:
        """Generate one clip per digit.

        Args:
            digit: A digit 0..9, or one digit per clip.
            size: `"small"`, `"large"`, or a geometry.
            num_inference_steps: Denoising steps; the size's default when left out.
            guidance_scale: Strength of classifier-free guidance; 1 or less runs only one half.
            generator: Source of the starting noise; a CPU one gives the same on every device.
            output_type: `"pt"`, `"np"` or `"pil"`.
            callback_on_step_end: Called after each step as
                `callback(pipe, step, timestep, {"latents": x_t})`.

        Raises:
            UsageError: If a digit, the number of steps or the output type is not allowed.

        Example:
            >>> pipe = load_pipeline()
            >>> noise = torch.Generator().manual_seed(0)
            >>> pipe(7, num_inference_steps=1, generator=noise).frames.shape
            torch.Size([1, 16, 1, 48, 48])
        """
        size = find_size(size)
        digits = [digit] if isinstance(digit, int) else list(digit)
        steps = size.default_steps if num_inference_steps is None else num_inference_steps
        _check_request(digits, steps, output_type)
        device, dtype = self._execution_device, self.transformer.dtype

        guided = guidance_scale > 1
        labels = self._label_tokens(digits, size, guided=guided, device=device)
        rotary = rotary_embedding(size, self.transformer.config.attention_head_dim, device)
        channels = self.transformer.config.in_channels
        shape = (len(digits), size.frames, channels, size.height, size.width)
        latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)

        self._set_timesteps(steps, size.shift, device)
        for index, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            inputs = torch.cat([latents, latents]) if guided else latents
            velocity = self.transformer(
                hidden_states=inputs.to(dtype),
                encoder_hidden_states=labels,
                timestep=timestep.expand(len(inputs)),
                image_rotary_emb=rotary,
                return_dict=False,
            )[0].float()
            if guided:
                empty, conditional = velocity.chunk(2)
                velocity = empty + guidance_scale * (conditional - empty)
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
            if callback_on_step_end is not None:
                callback_on_step_end(self, index, timestep, {"latents": latents})
        self.maybe_free_model_hooks()
        return DigitVideoOutput(frames=_to_output(latents, output_type))

    def _label_tokens(
        self, digits: list[int], size: DemoSize, *, guided: bool, device: torch.device
    ) -> torch.Tensor:
        """Token embeddings (B or 2B, tokens, dim), empty labels first."""
        empty = [self.label_embedding.empty_label] * len(digits) if guided else []
        labels = torch.tensor(empty + digits, device=device)
        return self.label_embedding(labels, size).to(self.transformer.dtype)

    def _set_timesteps(self, steps: int, shift: float, device: torch.device) -> None:
        """Even steps from noise (1) towards data (0), shifted towards noise."""
        sigmas = np.linspace(1.0, 1.0 / steps, steps)
        self.scheduler.set_timesteps(sigmas=sigmas, mu=math.log(shift), device=device)


def load_pipeline(
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
) -> DigitVideoPipeline:
    """Load the shipped model as a pipeline.

    Args:
        device: Where the model runs.
        dtype: Data type of weights and activations; the denoising state is float32 always.
        folder: Another folder with `config.json` and `model.safetensors`.

    Raises:
        DemoError: If the weights are missing or damaged.
    """
    model = load_model(folder=folder, device=device, dtype=dtype)
    scheduler = FlowMatchEulerDiscreteScheduler(**model.config["scheduler"])
    return DigitVideoPipeline(model.transformer, model.label_embedding, scheduler)


def _check_request(digits: list[int], steps: int, output_type: str) -> None:
    if not digits or any(digit not in range(10) for digit in digits):
        raise UsageError(f"digit is {digits}; pass one digit 0..9, or a list of them")
    if steps < 1:
        raise UsageError(f"num_inference_steps is {steps}; pass 1 or more")
    if output_type not in OUTPUT_TYPES:
        raise UsageError(f"output_type is {output_type!r}; pass one of {', '.join(OUTPUT_TYPES)}")


def _to_output(latents: torch.Tensor, output_type: str) -> Any:  # noqa: ANN401
    """Pixels in [-1, 1] (B, F, 1, H, W) as the caller wants them."""
    if not bool(torch.isfinite(latents).all()):
        raise DemoError(
            "the generated clip holds NaN or Inf; unpatch the pipeline or use dtype=torch.float32"
        )
    frames = (latents / 2 + 0.5).clamp(0, 1)
    if output_type == "pt":
        return frames
    arrays = frames.permute(0, 1, 3, 4, 2).cpu().numpy()
    if output_type == "np":
        return arrays
    from PIL import Image

    gray: Any = (arrays[..., 0] * 255).round().astype("uint8")
    return [[Image.fromarray(frame) for frame in clip] for clip in gray]
