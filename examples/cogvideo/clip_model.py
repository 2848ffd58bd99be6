"""The model that draws a clip: the embedded demo model or a text-to-video pipeline."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from sage_plugin.demo import SIZES, DigitVideoPipeline, load_pipeline
from sage_plugin.errors import DeviceError, UsageError

DEMO = "demo"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Request:
    """What to draw; `None` leaves a number to the model's pipeline.

    Attributes:
        prompt: the text, or the digit for the demo model.
        size: geometry of the demo model.
        num_frames: frames of the clip.
        height: of a frame in pixels.
        width: of a frame in pixels.
        steps: denoising steps.
        guidance: strength of classifier-free guidance.
        seed: of the starting noise, the same on every device.
    """

    prompt: str
    size: str | None
    num_frames: int | None
    height: int | None
    width: int | None
    steps: int | None
    guidance: float | None
    seed: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose the model and the clip."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default=DEMO, help="hub id or folder of a diffusers pipeline, or demo (default)"
    )
    model.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    model.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    model.add_argument("--size", choices=SIZES, help="of the demo model (default: by device)")
    clip = parser.add_argument_group("clip (default: what the pipeline does by itself)")
    clip.add_argument("--prompt", help="text; a digit 0..9 for the demo model")
    clip.add_argument("--num-frames", type=int)
    clip.add_argument("--height", type=int)
    clip.add_argument("--width", type=int)
    clip.add_argument("--num-inference-steps", type=int, help="denoising steps")
    clip.add_argument("--guidance-scale", type=float)
    clip.add_argument("--seed", type=int, default=0, help="of the starting noise (default 0)")


def request_from(options: argparse.Namespace) -> Request:
    """The clip that the options ask for.

    Raises:
        UsageError: an option is missing or out of range.
    """
    demo = options.model == DEMO
    if options.prompt is None and not demo:
        raise UsageError("--prompt is missing: say what the clip shows")
    if demo and (options.height or options.width):
        raise UsageError("the demo model draws two sizes: choose one with --size")
    if not demo and options.size:
        raise UsageError("--size is of the demo model: use --height and --width")
    numbers = (options.num_frames, options.height, options.width, options.num_inference_steps)
    if any(number is not None and number < 1 for number in numbers):
        raise UsageError("frames, height, width and steps are 1 or more")
    return Request(
        options.prompt or "7", options.size, options.num_frames, options.height, options.width,
        options.num_inference_steps, options.guidance_scale, options.seed,
    )  # fmt: skip


def device_from(name: str | None) -> torch.device:
    """The device asked for, by default a GPU if there is one.

    Raises:
        UsageError: the name is none of a device.
        DeviceError: torch cannot use it here.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device {name!r}: use cuda, cuda:1 or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here")
    return device


def load(
    model: str, device: torch.device, dtype: str | None, *, offload: bool = False
) -> DiffusionPipeline:
    """The model's pipeline on the device.

    Args:
        model: `"demo"`, a hub id or a folder.
        device: where it runs.
        dtype: a key of `DTYPES`, or `None` for the device's.
        offload: keep only the part that runs on the GPU, and decode in tiles.

    Raises:
        UsageError: the model cannot be loaded.
    """
    chosen = DTYPES[dtype or ("fp32" if device.type == "cpu" else "bf16")]
    pipe = _loaded(model, device, chosen, offload=offload)
    pipe.set_progress_bar_config(leave=False, disable=None)  # a bar on a terminal alone
    return pipe


def _loaded(
    model: str, device: torch.device, dtype: torch.dtype, *, offload: bool
) -> DiffusionPipeline:
    if model == DEMO:
        return load_pipeline(device=device, dtype=dtype)
    try:
        pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(". ")
        raise UsageError(
            f"cannot load {model!r} ({reason}): name a folder that holds a diffusers pipeline, or "
            "a hub id that is fetched already or can be (`hf download ID`); without weights, use "
            "--model demo, or generate.py --random-weights for the speed of a full-size step"
        ) from error
    if not offload:
        return pipe.to(device)
    if device.type == "cpu":
        raise UsageError("--offload is for a GPU: leave it out on a CPU")
    pipe.enable_model_cpu_offload(device=device)
    for saving in ("enable_tiling", "enable_slicing"):
        getattr(getattr(pipe, "vae", None), saving, lambda: None)()
    return pipe


def draw(
    pipe: DiffusionPipeline,
    request: Request,
    on_step: Callable[[torch.Tensor], None] | None = None,
) -> np.ndarray[Any, Any]:
    """One clip, (F, H, W, C) float32 in [0, 1]; C is 3, or 1 for the demo model.

    Args:
        pipe: the pipeline.
        request: what to draw.
        on_step: gets the latents at the end of each denoising step, where the pipeline tells them.

    Raises:
        UsageError: the pipeline does not make clips, or not such a one.
    """
    numbers: dict[str, Any] = {
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "generator": torch.Generator().manual_seed(request.seed),
        "output_type": "np",
    }
    if isinstance(pipe, DigitVideoPipeline):
        size = SIZES[request.size or ("small" if pipe.device.type == "cpu" else "large")]
        size = dataclasses.replace(size, frames=request.num_frames or size.frames)
        inputs = {"digit": _digit(request.prompt), "size": size}
    else:
        inputs = {"prompt": request.prompt}
        numbers |= {
            "num_frames": request.num_frames,
            "height": request.height,
            "width": request.width,
        }
    if (
        on_step is not None
        and "callback_on_step_end" in inspect.signature(pipe.__call__).parameters
    ):
        numbers["callback_on_step_end"] = functools.partial(_tell, on_step)
    given = {name: value for name, value in numbers.items() if value is not None}
    output = pipe(**inputs, **given)
    if not hasattr(output, "frames"):
        raise UsageError(f"{type(pipe).__name__} makes no clips: name a text-to-video pipeline")
    return np.asarray(output.frames[0], dtype=np.float32)


def _tell(
    on_step: Callable[[torch.Tensor], None],
    pipe: DiffusionPipeline,
    step: int,
    timestep: object,
    tensors: dict[str, Any],
) -> dict[str, Any]:
    """A pipeline's callback: takes back the tensors that it was given, here unchanged."""
    on_step(tensors["latents"])
    return tensors


def _digit(prompt: str) -> int:
    digits = re.findall(r"\d+", prompt)
    if len(digits) != 1 or len(digits[0]) != 1:
        raise UsageError(f"--prompt {prompt!r}: the demo model draws one digit, as --prompt 7")
    return int(digits[0])
