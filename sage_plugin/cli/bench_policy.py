"""`sage bench --policy ... --end-to-end`: a policy proved on whole clips of the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sage_plugin.cli import own_folder
from sage_plugin.cli.call_shape import checked_seed
from sage_plugin.cli.console import stderr, stdout
from sage_plugin.demo.sizes import SIZES, DemoSize
from sage_plugin.errors import OutputError, UsageError

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.end_to_end.draw import Frames, OnStep
    from sage_plugin.bench.end_to_end.record import Proof
    from sage_plugin.bench.end_to_end.run import Subject
    from sage_plugin.plugin.policy import Policy

FOLDER = Path("policy_bench")
MARK = ".sage-policy-bench"
MODEL = "CogVideoXTransformer3DModel"
"""Class of the embedded model, as policies name it."""

ALONE = {"policy", "end_to_end", "size", "digit", "num_inference_steps", "budget", "out"}
NEEDED = {"policy": "--policy with a file or a preset", "end_to_end": "--end-to-end"}
EFFECTS = {"effects", "bands", "size", "digit", "num_inference_steps"}
SHARED = {"kernel", "seed", "device", "config_dir"}
"""Options of `sage bench` that stand beside those of `ALONE`; no others do."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a proof was asked for.

    Attributes:
        policy: a preset or a file.
        kernels: the single kernels to compare with.
        device: where it runs.
        size: of the embedded model, `None` for the device's.
        digits: that are drawn, a clip each.
        steps: denoising steps, `None` for those that the policy was searched for, or the size's.
        seed: of the starting noise, and of the order of timing.
        budget_s: seconds for timing, `None` for the default.
        out: output folder.
        config_dir: folder of configs that is searched first.
    """

    policy: str
    kernels: tuple[str, ...]
    device: torch.device
    size: str | None
    digits: tuple[int, ...]
    steps: int | None
    seed: int
    budget_s: float | None
    out: Path
    config_dir: Path | None


class _Asked(Protocol):
    """What is used of a typer context."""

    command: Any

    def get_parameter_source(self, name: str) -> Any: ...  # noqa: ANN401


def asked(ctx: _Asked) -> bool:
    """Whether a command line of `sage bench` asks for whole clips: for a proof, or for effects.

    Raises:
        UsageError: one of its options has no place beside another.
    """
    given = {
        parameter.name: parameter.opts[0] if parameter.param_type_name == "option" else "FOLDER"
        for parameter in ctx.command.params
        if getattr(ctx.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    }
    if {"effects", "bands"} & set(given):
        _check_effects(given)
        return True
    own = ALONE & set(given)
    if not own:
        return False
    if missing := [words for name, words in NEEDED.items() if name not in own]:
        raise UsageError(
            f"{given[min(own)]} is of the proof of a policy on whole clips: add "
            f"{' and '.join(missing)}"
        )
    foreign = [name for name in given if name not in ALONE | SHARED]
    if foreign:
        raise UsageError(
            f"{given[foreign[0]]} has no place beside --end-to-end, which draws whole clips: leave "
            f"it out, or leave out {' and '.join(given[name] for name in sorted(own))}"
        )
    return True


def _check_effects(given: Mapping[str, str]) -> None:
    """Refuse what has no place beside `--effects`.

    Raises:
        UsageError: such an option was given, or `--bands` alone.
    """
    if "effects" not in given:
        raise UsageError("--bands is of --effects, which measures what clips feel: name its file")
    if foreign := [name for name in given if name not in EFFECTS | SHARED]:
        raise UsageError(f"{given[foreign[0]]} has no place beside --effects: leave it out")


def run(ask: Ask) -> None:
    """Draw, compare, time, show and write.

    Raises:
        UsageError: the policy is of another model, or the output folder somebody else's.
        ConfigError: the policy is no sound one, or names no layer of the model.
    """
    from sage_plugin.bench.end_to_end import plot
    from sage_plugin.bench.end_to_end.rounds import LIMITS
    from sage_plugin.bench.end_to_end.run import prove
    from sage_plugin.bench.end_to_end.way import ways as ways_of
    from sage_plugin.cli.proof_table import render

    checked_seed(ask.seed)
    policy = checked_policy(ask.policy)
    ways, name = ways_of(ask.kernels, policy), size_of(ask)
    size = SIZES[name]
    steps = ask.steps or _foreseen_steps(policy) or size.default_steps
    with progress_line() as tell:
        tell("loading the model")
        subject = subject_of(ask, size, steps)
        subject.denoisers(ways)  # a policy that does not fit is refused before the old folder goes
        own_folder.prepare(ask.out, mark=MARK, command="sage bench --end-to-end")
        limits = LIMITS if ask.budget_s is None else replace(LIMITS, budget_s=ask.budget_s)
        proof, clips = prove(subject, ways, limits=limits, seed=ask.seed, tell=tell)
    stdout.print(render(proof, width=stdout.width), soft_wrap=False)
    _save_clips({name: clip[: size.frames] for name, clip in clips.items()}, ask.out)
    note = plot.save(proof, ask.out / "plane.png")
    facts = {"policy": ask.policy, "size": name, "digits": list(ask.digits), "steps": steps}
    _write(proof, ask, facts)
    for sentence in (note, f"Wrote result.json, the plot and clips to {ask.out}."):
        if sentence:
            _say(sentence)
    _say(_advice(ask, proof))


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
    from sage_plugin.plugin.policy import chosen

    policy = chosen(text)
    if policy.model not in ("", MODEL):
        raise UsageError(
            f"{text} is for {policy.model}, and the embedded model is {MODEL}: prove it on its own "
            f"model with examples/cogvideo/compare.py --model ID --policy {text}"
        )
    return policy


def size_of(ask: Ask) -> str:
    """The size that was asked for, or the device's.

    Raises:
        UsageError: no such size.
    """
    name = ask.size or ("small" if ask.device.type == "cpu" else "large")
    if name not in SIZES:
        raise UsageError(f"--size {ask.size!r}: allowed are {', '.join(SIZES)}")
    return name


def _foreseen_steps(policy: Policy) -> int | None:
    return None if policy.prediction is None else policy.prediction.steps


def subject_of(ask: Ask, size: DemoSize, steps: int) -> Subject:
    """The embedded model, and how it draws: bf16 on a GPU, fp32 on a CPU."""
    import numpy as np
    import torch

    from sage_plugin.bench.end_to_end.run import Subject
    from sage_plugin.demo import load_pipeline

    dtype = torch.float32 if ask.device.type == "cpu" else torch.bfloat16
    pipe = load_pipeline(device=ask.device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)

    def draw(on_step: OnStep) -> Frames:
        output = pipe(
            list(ask.digits),
            size=size,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(ask.seed),
            output_type="np",
            callback_on_step_end=lambda _pipe, _step, _time, at: on_step(at["latents"]),
        )
        frames: Frames = np.concatenate(list(output.frames))  # the clips one after the other
        return frames

    return Subject(pipe, draw, ask.device, config_dir=ask.config_dir)


def _save_clips(clips: Mapping[str, Frames], folder: Path) -> None:
    """The host's clip, the policy's, and both side by side with their difference.

    Raises:
        OutputError: they cannot be written.
    """
    import torch

    from sage_plugin.bench.end_to_end.way import HOST, POLICY
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


def _write(proof: Proof, ask: Ask, facts: Mapping[str, object]) -> None:
    from sage_plugin import device as devices
    from sage_plugin.bench.end_to_end.report import json_text
    from sage_plugin.bench.report import write

    whole = {
        **facts,
        "seed": ask.seed,
        "device": devices.facts(ask.device).to_json(),
        "toolchain": devices.toolchain().to_json(),
    }
    write(ask.out / "result.json", json_text(proof, whole))


def _advice(ask: Ask, proof: Proof) -> str:
    """What to do next."""
    if not proof.stamp:
        return f"Next: look at {ask.out / 'side_by_side.gif'}, and prove the policy on a GPU"
    gap = proof.above_line_db
    if gap is not None and gap < 0:
        return "Next: sage tune --policy, to search one that is worth more than a single kernel"
    return f"Next: sage_plugin.patch(pipe, policy={ask.policy!r})"


def _say(sentence: str) -> None:
    stderr.print(sentence, markup=False, highlight=False)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on; yields what changes it."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda words: progress.update(task, description=words)
