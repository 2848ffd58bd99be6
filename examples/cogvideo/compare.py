"""Draw one clip on each kernel and measure how far the clips are from that of the host's attention.

    python compare.py                                            # the embedded demo model
    python compare.py --kernels sage,fav3_sage --size large --output compare_large
    python compare.py --model THUDM/CogVideoX-2b --dtype fp16 --prompt "a cat walks on the grass"

Writes sheet.png, side_by_side.gif, frames.csv and metrics.json to the output folder.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clip_file
import clip_model
import numpy as np
import step_timing
import torch
from clip_quality import quality
from comparison import Comparison, Drawn
from diffusers import DiffusionPipeline
from generate import FPS, identity
from torch import nn

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.errors import SageError
from sage_plugin.kernels import dispatch
from sage_plugin.plugin.patch import MIN_SEQ


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--kernels", help="names with commas (default: all that the device runs)")
    clip_model.add_options(result)
    result.add_argument(
        "--budget", type=float, help="seconds for timing steps (default 60, 3 on a CPU)"
    )
    result.add_argument("--output", type=Path, default=Path("comparison"), help="folder")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code."""
    options = parser().parse_args(arguments)
    try:
        compare(options, list(sys.argv[1:] if arguments is None else arguments))
    except SageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Draw, measure, time, write."""
    request = clip_model.request_from(options)
    device = clip_model.device_from(options.device)
    kernels = _kernels(options.kernels, device)
    folder = clip_file.make_folder(options.output)
    pipe = clip_model.load(options.model, device, options.dtype)
    say(f"drawing with the host's attention (1 of {len(kernels) + 1})")
    denoiser, inputs, reference = draw_reference(pipe, request)
    drawn = {}
    for count, kernel in enumerate(kernels, start=2):
        say(f"drawing with {kernel} ({count} of {len(kernels) + 1})")
        with sage_plugin.patched(pipe, kernel=kernel) as handle:
            frames = clip_model.draw(pipe, request)
        calls = handle.report()
        drawn[kernel] = Drawn(
            frames, quality(frames, reference), calls.kernel_calls(), calls.total_calls()
        )
    say("timing interleaved steps")
    steps = step_timing.time_steps(
        denoiser, inputs, kernels, min_seq=MIN_SEQ, budget_s=options.budget
    )
    result = Comparison(reference, drawn, steps, FPS)
    print(result.text())
    facts = {"model": options.model, "seed": request.seed, "frames": len(reference)}
    result.write(folder, facts | identity(device, "compare.py", arguments))
    print(f"Wrote sheet.png, side_by_side.gif, frames.csv and metrics.json to {folder}")


def _kernels(names: str | None, device: torch.device) -> list[str]:
    """The named kernels, or all that the device runs but the oracle."""
    if names is None:
        every = dispatch.kernels_of(devices.facts(device))
        return [kernel for kernel in every if kernel != "torch"]
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        dispatch.parse_kernel(name)
    return list(dict.fromkeys(chosen))


def draw_reference(
    pipe: DiffusionPipeline, request: clip_model.Request
) -> tuple[nn.Module, dict[str, Any], np.ndarray[Any, Any]]:
    """Draw unpatched; the denoiser, the inputs of its first step, and the clip."""
    with sage_plugin.patched(pipe, kernel="sdpa") as handle:
        denoiser = next(iter(handle.components.values()))
    inputs: dict[str, Any] = {}

    def keep(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        inputs.update({} if inputs else bound.arguments)

    hook = denoiser.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        clip = clip_model.draw(pipe, request)
    finally:
        hook.remove()
    return denoiser, inputs, clip


def say(sentence: str) -> None:
    """Progress."""
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
