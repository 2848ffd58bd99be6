"""Draw a clip with a video model whose attention runs on a kernel of sage_plugin.

    python generate.py                                          # the embedded demo model
    python generate.py --model THUDM/CogVideoX-2b --dtype fp16 --prompt "a cat walks on the grass"
    python generate.py --random-weights --json step.json        # no weights: the speed of a step

It ends with a video file and a report on which attention calls ran on which kernel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clip_file
import clip_model
import diffusers
import random_weights
import step_timing
import torch
from text_table import text_table

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.errors import OutputError, SageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.plugin.policy import rules as policies
from sage_plugin.plugin.report import PluginReport

FPS = 8


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--kernel",
        default="auto",
        help="auto (default), sdpa, fav2, sage, fav3_sage, fav3_fp8, or kernel:variant; several "
        "with commas for --random-weights",
    )
    result.add_argument(
        "--policy",
        help="fast, balanced, safe, or a file of rules, in place of --kernel (docs/policy.md)",
    )
    clip_model.add_options(result)
    result.add_argument("--offload", action="store_true", help="for GPUs with little memory")
    out = result.add_argument_group("output")
    out.add_argument("--output", type=Path, default=Path("video.mp4"), help="file, .mp4 or .gif")
    out.add_argument("--fps", type=int, default=FPS, help=f"frames per second (default {FPS})")
    out.add_argument("--layers-report", action="store_true", help="report every layer")
    speed = result.add_argument_group("speed without weights")
    speed.add_argument(
        "--random-weights",
        action="store_true",
        help="time denoising steps of a full-size CogVideoX with random weights, and stop",
    )
    speed.add_argument("--variant", choices=random_weights.VARIANTS, default="2b")
    speed.add_argument("--tiny", action="store_true", help="a tiny model instead, for a CPU")
    speed.add_argument("--budget", type=float, help="seconds for timing (default 60, 3 on a CPU)")
    speed.add_argument("--json", type=Path, help="file for the times, with their identity")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.random_weights:
            time_random_weights(options, list(sys.argv[1:] if arguments is None else arguments))
        else:
            generate(options)
    except SageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def generate(options: argparse.Namespace) -> None:
    """Load, patch, draw, write, report."""
    request = clip_model.request_from(options)
    dispatch.parse_kernel(options.kernel)
    if options.policy is not None:
        policies.chosen(options.policy)  # before a model is loaded for nothing
    clip_file.check_output(options.output)
    device = clip_model.device_from(options.device)
    pipe = clip_model.load(options.model, device, options.dtype, offload=options.offload)
    with sage_plugin.patched(pipe, kernel=options.kernel, policy=options.policy) as handle:
        frames = clip_model.draw(pipe, request)
    report = handle.report()
    path, note = clip_file.save_clip(frames, options.output, options.fps)
    print(report.text(every_layer=True) if options.layers_report else summary(report))
    if note:
        print(note, file=sys.stderr)
    print(f"Wrote {path}: {len(frames)} frames")


def summary(report: PluginReport) -> str:
    """The report of a run without its layers."""
    ran: Counter[str] = Counter()
    for row in report.rows:
        ran.update(row.calls)
        ran.update({f"the host's attention, {why}": n for why, n in row.fallbacks.items()})
    lines = [
        f"{report.kernel_calls()} of {report.total_calls()} attention calls in {len(report.rows)} "
        "layers ran on a kernel:"
    ]
    return "\n".join([*lines, *(f"  {count} on {label}" for label, count in ran.items())])


def time_random_weights(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Time a step unpatched and on each kernel, and say what it is worth."""
    device = clip_model.device_from(options.device)
    kernels = options.kernel.split(",")
    for kernel in kernels:
        dispatch.parse_kernel(kernel)
    dtype = clip_model.DTYPES[options.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    if options.json is not None:
        clip_file.make_folder(options.json.absolute().parent)
    step = random_weights.build(
        options.variant, device, dtype, tiny=options.tiny, seed=options.seed
    )
    name = f"{'a tiny CogVideoX' if options.tiny else f'CogVideoX-{options.variant.upper()}'}"
    print(
        f"Random weights, for speed only: {name}, {step.config['num_layers']} layers, "
        f"{step.tokens} tokens, batch {random_weights.BATCH}, {dtype} on {device}.",
        "Timing interleaved steps ...",
        sep="\n",
        file=sys.stderr,
    )
    times = step_timing.time_steps(
        step.model, step.arguments, kernels, min_seq=0, budget_s=options.budget
    )
    print(step_table(times))
    if options.json is not None:
        facts = {
            "schema_version": 1,
            "what": f"one denoising step (a transformer forward) of {name}, random weights",
            "batch": random_weights.BATCH,
            "tokens": step.tokens,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": options.seed,
            "config": step.config,
            **times.to_json(),
            **identity(device, "generate.py", arguments),
        }
        try:
            options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{options.json} cannot be written: {error.strerror}") from error
        print(f"Wrote {options.json}")


def identity(device: torch.device, script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What a measurement was made with."""
    return {
        "device": devices.facts(device).to_json(),
        "toolchain": devices.toolchain().to_json() | {"diffusers": diffusers.__version__},
        "command": shlex.join([script, *arguments]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def step_table(times: step_timing.StepTimes) -> str:
    """Times of the steps as text."""
    rows = [("step", "time of a step", "unpatched / this", "on a kernel", "peak memory")]
    for row in times.rows:
        peak = "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.2f} GiB"
        calls = f"{row.kernel_calls} of {row.attention_calls} calls"
        rows.append((row.name, *step_timing.time_cells(row), calls, peak))
    ran = [
        f"  {row.name}: {', '.join(f'{n} x {x}' for x, n in row.ran.items())}" for row in times.rows
    ]
    return "\n".join(
        [text_table(rows), "attention calls of a step:", *ran,
         f"self-test: the unpatched step against itself {times.aa_ratio:.4f}, {times.stamp}"]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
