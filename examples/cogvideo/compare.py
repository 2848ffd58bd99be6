"""Draw one clip on each kernel, and by a policy, and measure how far and how fast each is.

python compare.py                                            # the embedded demo model
python compare.py --kernels sage,fav3_sage --size large --output compare_large
python compare.py --model THUDM/CogVideoX-2b --dtype fp16 --prompt "a cat walks on the grass"
python compare.py --policy policy.json                       # is it worth more than one kernel?
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import replace
from pathlib import Path

import generate
from rich.console import Console

from sage_plugin import device as devices
from sage_plugin.bench.clips import plot
from sage_plugin.bench.clips.draw import Subject
from sage_plugin.bench.clips.record import json_text
from sage_plugin.bench.clips.rounds import LIMITS
from sage_plugin.bench.clips.run import compare_clips
from sage_plugin.bench.clips.run_config import run_configs
from sage_plugin.cli.clip_table import render
from sage_plugin.demo.film import save_comparison
from sage_plugin.files import write_atomically
from sage_plugin.kernels.attention.dispatch import kernels_of, parse_kernel
from sage_plugin.plugin.policy.rules import chosen as chosen_policy

BASELINE = "unpatched"


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    raw = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    result.add_argument("--kernels", help="names with commas (default: all that the device runs)")
    result.add_argument("--policy", help="fast, balanced, safe, or a file of rules")
    generate.add_model_options(result)
    result.add_argument("--budget", type=float, help="seconds for timing whole runs (default 60)")
    result.add_argument("--output", type=Path, default=Path("comparison"), help="folder")
    return result


def compare(options: argparse.Namespace) -> None:
    """Draw, measure, show, write."""
    device, facts = devices.chosen(options.device)
    inputs = generate.inputs_from(options, device)
    kernels = [name for name in kernels_of(facts) if name != "torch"]
    if options.kernels is not None:
        kernels = [name.strip() for name in options.kernels.split(",")]
    for name in kernels:
        parse_kernel(name)
    policy = None if options.policy is None else chosen_policy(options.policy)
    generate.make_folder(options.output)
    side_by_side = options.output / "side_by_side"
    pipe = generate.load(options, device)
    subject = Subject(pipe, functools.partial(generate.draw, pipe, inputs), device)
    comparison, _ = compare_clips(
        subject,
        run_configs(kernels, policy, baseline=BASELINE),
        limits=LIMITS if options.budget is None else replace(LIMITS, budget_s=options.budget),
        seed=options.seed,
        report_progress=lambda words: print(words, file=sys.stderr, flush=True),
        on_clip=lambda clips: save_comparison(clips, side_by_side, fps=generate.FPS),
    )
    console = Console()
    console.print(render(comparison, width=console.width))
    about = {
        "model": options.model,
        "policy": options.policy,
        "seed": options.seed,
        "device": facts.to_json(),
        "toolchain": devices.toolchain().to_json(),
    }
    write_atomically(options.output / "result.json", json_text(comparison, about))
    if note := plot.save(comparison, options.output / "plane.png"):
        print(note, file=sys.stderr)
    print(f"Wrote result.json, plane.png and the clips side by side to {options.output}")


if __name__ == "__main__":
    sys.exit(generate.main(options_of=parser, run=compare))
