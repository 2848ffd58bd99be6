"""Draw a clip with a text-to-video pipeline whose attention runs on a kernel of sage_plugin.

python generate.py --prompt 7                                   # the embedded demo model
python generate.py --prompt 7 --policy balanced --output seven.mp4 --layers-report
python generate.py --model THUDM/CogVideoX-2b --dtype fp16 --prompt "a cat walks on the grass"
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import export_to_gif, export_to_video
from PIL import Image

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.demo import SIZES, load_pipeline
from sage_plugin.errors import OutputError, SageError, UsageError
from sage_plugin.kernels.attention.dispatch import parse_kernel
from sage_plugin.plugin.policy.rules import chosen as chosen_policy
from sage_plugin.plugin.report import PluginReport

DEMO, FPS = "demo", 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the model and the clip."""
    add = parser.add_argument
    add("--model", default=DEMO, help="hub id or folder of a diffusers pipeline (default: demo)")
    add("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    add("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    add("--size", choices=SIZES, help="of the demo model (default: by device)")
    add("--prompt", help="text; a digit 0..9 for the demo model")
    add("--num-frames", type=int, help="these four: default is what the pipeline does by itself")
    add("--height", type=int)
    add("--width", type=int)
    add("--num-inference-steps", type=int, help="denoising steps")
    add("--guidance-scale", type=float)
    add("--seed", type=int, default=0, help="of the starting noise (default 0)")


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    raw = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    result.add_argument("--kernel", default="auto", help="kernel, or kernel:variant")
    result.add_argument("--policy", help="fast, balanced, safe, or a file of rules")
    add_model_options(result)
    result.add_argument("--offload", action="store_true", help="only the running part on the GPU")
    result.add_argument("--output", type=Path, default=Path("video.mp4"), help=".mp4 or .gif")
    result.add_argument("--layers-report", action="store_true", help="report each layer")
    return result


def main(
    arguments: Sequence[str] | None = None,
    options_of: Callable[[], argparse.ArgumentParser] = parser,
    run: Callable[[argparse.Namespace], None] | None = None,
) -> int:
    """Run, and return the exit code; a mistake is one sentence."""
    try:
        (run or generate)(options_of().parse_args(arguments))
    except SageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def generate(options: argparse.Namespace) -> None:
    """Load, patch, draw, write, report."""
    device, _ = devices.chosen(options.device)
    inputs = inputs_from(options, device)
    parse_kernel(options.kernel)  # mistakes show before a model is loaded for nothing
    policy = None if options.policy is None else chosen_policy(options.policy)
    if options.output.suffix not in (".mp4", ".gif"):
        raise UsageError(f"--output {options.output}: the name must end in .mp4 or .gif")
    make_folder(options.output.parent)
    pipe = load(options, device)
    with sage_plugin.patched(pipe, kernel=options.kernel, policy=policy) as handle:
        frames = draw(pipe, inputs)
    report = handle.report()
    print(report.text(every_layer=True) if options.layers_report else summary(report))
    print(f"Wrote {save(frames, options.output)}: {len(frames)} frames")


def inputs_from(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return what the pipeline is called with.

    Raises:
        UsageError: an option is missing or out of range.
    """
    names = ("num_frames", "height", "width", "num_inference_steps", "guidance_scale")
    given = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    if any(number < 1 for name, number in given.items() if name != "guidance_scale"):
        raise UsageError("frames, height, width and steps are 1 or more")
    if options.model != DEMO:
        if options.prompt is None:
            raise UsageError("--prompt is missing: say what the clip shows")
        if options.size:
            raise UsageError("--size is of the demo model: use --height and --width")
        return given | {"prompt": options.prompt, "seed": options.seed}
    if options.height or options.width:
        raise UsageError("the demo model draws two sizes: choose one with --size")
    digit = options.prompt or "7"
    if not (digit.isascii() and digit.isdigit() and len(digit) == 1):
        raise UsageError(f"--prompt {digit!r}: the demo model draws one digit, as --prompt 7")
    size = SIZES[options.size or ("small" if device.type == "cpu" else "large")]
    size = replace(size, frames=given.pop("num_frames", size.frames))
    return given | {"digit": int(digit), "size": size, "seed": options.seed}


def load(options: argparse.Namespace, device: torch.device) -> DiffusionPipeline:
    """Load the model's pipeline onto the device.

    Raises:
        UsageError: the model cannot be loaded.
    """
    dtype = DTYPES[options.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    if options.model == DEMO:
        pipe = load_pipeline(device=device, dtype=dtype)
    else:
        try:
            pipe = DiffusionPipeline.from_pretrained(options.model, dtype=dtype)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(". ")
            raise UsageError(
                f"cannot load {options.model!r} ({reason}): name a folder that holds a diffusers "
                "pipeline, or a hub id that is fetched already or can be (`hf download ID`); "
                "without weights, use --model demo"
            ) from error
        if getattr(options, "offload", False) and device.type != "cpu":
            pipe.enable_model_cpu_offload(device=device)
            pipe.vae.enable_tiling()
        else:
            pipe.to(device)
    pipe.set_progress_bar_config(leave=False, disable=None)  # a bar on a terminal alone
    return pipe


def draw(
    pipe: DiffusionPipeline,
    inputs: dict[str, Any],
    on_step: Callable[[torch.Tensor], None] | None = None,
) -> np.ndarray[Any, Any]:
    """Draw one clip, (F, H, W, C) float32 in [0, 1]; C is 3, or 1 for the demo model.

    Args:
        pipe: the pipeline.
        inputs: what it is called with, and the seed.
        on_step: gets the latents at the end of each denoising step, if the pipeline tells them.

    Raises:
        UsageError: the pipeline does not make clips.
    """
    given = {name: value for name, value in inputs.items() if name != "seed"}
    given["generator"] = torch.Generator().manual_seed(inputs["seed"])
    if on_step and "callback_on_step_end" in inspect.signature(pipe.__call__).parameters:

        def tell(_pipe: object, _step: int, _time: object, tensors: dict[str, Any]) -> object:
            on_step(tensors["latents"])
            return tensors

        given["callback_on_step_end"] = tell
    output = pipe(output_type="np", **given)
    if not hasattr(output, "frames"):
        raise UsageError(f"{type(pipe).__name__} makes no clips: name a text-to-video pipeline")
    return np.asarray(output.frames[0], dtype=np.float32)


def summary(report: PluginReport) -> str:
    """Write the report of a run without its layers."""
    ran: Counter[str] = Counter()
    for row in report.rows:
        ran.update(row.calls)
        ran.update({f"the host's attention, {why}": n for why, n in row.fallbacks.items()})
    head = f"{report.kernel_calls()} of {report.total_calls()} attention calls"
    lines = [f"{head} in {len(report.rows)} layers ran on a kernel:"]
    return "\n".join([*lines, *(f"  {count} on {label}" for label, count in ran.items())])


def save(frames: np.ndarray[Any, Any], path: Path) -> Path:
    """Write a clip as mp4 if ffmpeg is at hand, else as GIF; small frames are enlarged."""
    factor = max(1, -(-192 // min(frames.shape[1:3])))
    pixels = (frames.clip(0, 1) * 255).round().astype(np.uint8).repeat(factor, 1).repeat(factor, 2)
    images = [Image.fromarray(np.broadcast_to(one, (*one.shape[:2], 3))) for one in pixels]
    try:
        if path.suffix == ".mp4":
            try:
                import imageio_ffmpeg  # noqa: F401

                return Path(export_to_video(images, str(path), fps=FPS, quality=8.0))
            except (ImportError, AttributeError, RuntimeError):
                print("mp4 needs `pip install imageio imageio-ffmpeg`", file=sys.stderr)
        return Path(export_to_gif(images, str(path.with_suffix(".gif")), fps=FPS))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make a folder if it is missing.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"folder {path} cannot be made: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
