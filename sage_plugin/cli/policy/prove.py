"""`sage policy prove`: whole clips of the embedded model by the host, each kernel and a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli import own_folder
from sage_plugin.cli.bench import ConfigDir, Device, Kernels, device_of, named_kernels
from sage_plugin.cli.console import stderr, stdout
from sage_plugin.cli.policy import clips as policy_clips
from sage_plugin.cli.policy.clips import Clips
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import OutputError, UsageError

if TYPE_CHECKING:
    from sage_plugin.bench.clips.draw import Frames
    from sage_plugin.bench.clips.record import Proof
    from sage_plugin.plugin.policy.rules import Policy

FOLDER = Path("policy_bench")
MARK = ".sage-policy-bench"
MODEL = "CogVideoXTransformer3DModel"
"""Class of the embedded model, as policies name it."""

PolicyOf = Annotated[str, typer.Argument(metavar="POLICY", help="File of rules, or a preset.")]
Budget = Annotated[
    float | None, typer.Option(min=0, help="Seconds for timing whole clips (default 60).")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the proof.")]


def command(
    policy: PolicyOf,
    kernel: Kernels = None,
    size: policy_clips.Size = None,
    digit: policy_clips.Digits = None,
    num_inference_steps: policy_clips.Steps = None,
    seed: policy_clips.Seed = 0,
    budget: Budget = None,
    out: Out = FOLDER,
    device: Device = None,
    config_dir: ConfigDir = None,
) -> None:
    """Draw whole clips by the host, by each kernel and by a policy: time, PSNR, SSIM."""
    where, facts = device_of(device)
    kernels = policy_clips.labels(named_kernels(kernel or (), facts))
    clips = Clips(where, size, tuple(digit or (7,)), num_inference_steps, seed, config_dir)
    run(policy, kernels, clips, budget, out)


def run(
    policy_name: str, kernels: tuple[str, ...], clips: Clips, budget_s: float | None, out: Path
) -> None:
    """Draw, compare, time, show and write.

    Raises:
        UsageError: the policy is of another model, or the output folder somebody else's.
        ConfigError: the policy is no sound one, or names no layer of the model.
    """
    from sage_plugin.bench.clips import plot
    from sage_plugin.bench.clips.rounds import LIMITS
    from sage_plugin.bench.clips.run import prove
    from sage_plugin.bench.clips.run_config import ways as ways_of
    from sage_plugin.cli.policy.proof_table import render

    policy = checked_policy(policy_name)
    ways, name = ways_of(kernels, policy), clips.size_name()
    size = SIZES[name]
    steps = clips.steps or _foreseen_steps(policy) or size.default_steps
    with policy_clips.progress_line() as tell:
        tell("loading the model")
        subject = clips.subject(steps)
        subject.denoisers(ways)  # a policy that does not fit is refused before the old folder goes
        own_folder.prepare(out, mark=MARK, command="sage policy prove")
        limits = LIMITS if budget_s is None else replace(LIMITS, budget_s=budget_s)
        proof, films = prove(subject, ways, limits=limits, seed=clips.seed, tell=tell)
    stdout.print(render(proof, width=stdout.width), soft_wrap=False)
    _save_clips({name: clip[: size.frames] for name, clip in films.items()}, out)
    note = plot.save(proof, out / "plane.png")
    facts = {"policy": policy_name, "size": name, "digits": list(clips.digits), "steps": steps}
    _write(proof, clips, out, facts)
    for sentence in (note, f"Wrote result.json, the plot and clips to {out}."):
        if sentence:
            _say(sentence)
    _say(_advice(policy_name, out, proof))


def checked_policy(text: str) -> Policy:
    """A policy that is none of another model than the embedded one.

    Args:
        text: a preset or a file.

    Raises:
        ConfigError: there is no such file or preset, or it is no sound policy.
        UsageError: it is for another model.

    Example:
        >>> checked_policy("fast").rules[0].kernel
        'auto'
    """
    from sage_plugin.plugin.policy.rules import chosen

    policy = chosen(text)
    if policy.model not in ("", MODEL):
        raise UsageError(
            f"{text} is for {policy.model}, and the embedded model is {MODEL}: prove it on its own "
            f"model with examples/cogvideo/compare.py --model ID --policy {text}"
        )
    return policy


def _foreseen_steps(policy: Policy) -> int | None:
    return None if policy.prediction is None else policy.prediction.steps


def _save_clips(clips: Mapping[str, Frames], folder: Path) -> None:
    """The host's clip, the policy's, and both side by side with their difference.

    Raises:
        OutputError: they cannot be written.
    """
    import torch

    from sage_plugin.bench.clips.run_config import HOST, POLICY
    from sage_plugin.demo.film import save_clips

    host, ours = (
        torch.from_numpy(clips[name]).permute(0, 3, 1, 2)[None] for name in (HOST, POLICY)
    )
    both = torch.cat([host, ours, (host - ours).abs()])
    try:
        for name, frames in (("host", host), ("policy", ours), ("side_by_side", both)):
            save_clips(frames, folder / name)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error


def _write(proof: Proof, clips: Clips, out: Path, facts: Mapping[str, object]) -> None:
    from sage_plugin import device as devices
    from sage_plugin.bench.clips.report import json_text

    whole = {
        **facts,
        "seed": clips.seed,
        "device": devices.facts(clips.device).to_json(),
        "toolchain": devices.toolchain().to_json(),
    }
    files.write_atomically(out / "result.json", json_text(proof, whole))


def _advice(policy: str, out: Path, proof: Proof) -> str:
    """What to do next."""
    if not proof.stamp:
        return f"Next: look at {out / 'side_by_side.gif'}, and prove the policy on a GPU"
    gap = proof.above_line_db
    if gap is not None and gap < 0:
        return "Next: sage policy search, to search one that is worth more than a single kernel"
    return f"Next: sage_plugin.patch(pipe, policy={policy!r})"


def _say(sentence: str) -> None:
    stderr.print(sentence, markup=False, highlight=False)
