"""Draw one clip on each kernel and measure how far the clips are from that of the host's attention.

    python compare.py                                            # the embedded demo model
    python compare.py --kernels sage,fav3_sage --size large --output compare_large
    python compare.py --model THUDM/CogVideoX-2b --dtype fp16 --prompt "a cat walks on the grass"
    python compare.py --policy policy.json                       # is it worth more than one kernel?

Writes sheet.png, side_by_side.gif, frames.csv and metrics.json to the output folder, of a policy
also result.json and plane.png.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import clip_file
import clip_model
import step_timing
import torch
from comparison import REFERENCE, Comparison
from generate import FPS, identity
from torch import nn

from sage_plugin import device as devices
from sage_plugin.bench.clips.rounds import LIMITS
from sage_plugin.bench.clips.run import Subject, prove
from sage_plugin.bench.clips.run_config import ways as ways_of
from sage_plugin.errors import SageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.plugin.patch import MIN_SEQ
from sage_plugin.plugin.policy import rules as policies


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--kernels", help="names with commas (default: all that the device runs)")
    result.add_argument(
        "--policy", help="fast, balanced, safe, or a file of rules: prove it beside the kernels"
    )
    clip_model.add_options(result)
    result.add_argument(
        "--budget",
        type=float,
        help="seconds for timing steps, and again for whole runs (default 60)",
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
    policy = None if options.policy is None else policies.chosen(options.policy)
    folder = clip_file.make_folder(options.output)
    pipe = clip_model.load(options.model, device, options.dtype)
    subject = Subject(pipe, functools.partial(clip_model.draw, pipe, request), device)
    ways = ways_of(kernels, policy, host=REFERENCE)
    denoiser = subject.denoisers(ways)[0]
    with first_inputs(denoiser) as inputs:
        proof, clips = prove(
            subject,
            ways,
            timed=policy is not None,
            limits=LIMITS if options.budget is None else replace(LIMITS, budget_s=options.budget),
            seed=request.seed,
            tell=say,
        )
    say("timing interleaved steps")
    steps = step_timing.time_steps(
        denoiser, inputs, kernels, min_seq=MIN_SEQ, budget_s=options.budget
    )
    result = Comparison(proof, clips, steps, FPS)
    print(result.text())
    facts = {"model": options.model, "seed": request.seed, "frames": len(clips[REFERENCE])}
    if policy is not None:
        facts["policy"] = options.policy
    note = result.write(folder, facts | identity(device, "compare.py", arguments))
    if note:
        say(note)
    more = "" if policy is None else ", and result.json and plane.png of the policy,"
    print(f"Wrote sheet.png, side_by_side.gif, frames.csv and metrics.json{more} to {folder}")


def _kernels(names: str | None, device: torch.device) -> list[str]:
    """The named kernels, or all that the device runs but the oracle."""
    if names is None:
        every = dispatch.kernels_of(devices.facts(device))
        return [kernel for kernel in every if kernel != "torch"]
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        dispatch.parse_kernel(name)
    return list(dict.fromkeys(chosen))


@contextlib.contextmanager
def first_inputs(denoiser: nn.Module) -> Iterator[dict[str, Any]]:
    """The inputs of a denoiser's first step, filled in when it comes."""
    inputs: dict[str, Any] = {}

    def keep(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not inputs:
            inputs.update(inspect.signature(model.forward).bind(*args, **kwargs).arguments)

    hook = denoiser.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield inputs
    finally:
        hook.remove()


def say(sentence: str) -> None:
    """Progress."""
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
