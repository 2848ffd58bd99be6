"""`sage doctor`: what this machine has, what each kernel can do on it, and its tuned configs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.configs.sources import As, facts_of
from sage_plugin.cli.console import command_line, say, stdout
from sage_plugin.cli.options import Device, ShapeOptions, lengths
from sage_plugin.errors import ConfigError, UsageError, number_of
from sage_plugin.schema import KERNELS, DeviceFacts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sage_plugin.kernels.attention.support_row import Support
    from sage_plugin.plugin.plan.run_plan import RunPlan

PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "safetensors")
HEAD_DIMS = (64, 128)
WIDEST = 256
"""The most channels of a head that a kernel takes."""
HEADS = 24
EMULATED = "emulated in plain torch: right numbers, no speed"


Plan = Annotated[
    str | None,
    typer.Option(
        metavar="SCRIPT|MODEL",
        help="Tell what each module will run on: a script with its arguments, whose first step is "
        "run, or the folder or config.json of a model.",
    ),
]
SeqLen = Annotated[
    list[str] | None, typer.Option("--seq-len", help="Of a model that has no length of its own.")
]


def command(
    device: Device = None, card: As = None, plan: Plan = None, seq_len: SeqLen = None
) -> None:
    """Print what is here and what each kernel can do with it; paste it into a report of a fault."""
    facts = facts_of(device, card, None)
    if plan is not None:
        _plan(plan, facts, seq_len or [], card)
        return
    if seq_len:
        raise UsageError("--seq-len is of a model: add --plan MODEL")
    say(_verdict(facts))
    for title, lines in (
        ("Device", _device(facts)),
        ("Versions", _versions()),
        ("Environment", _environment()),
        ("Configs", _configs(facts)),
        ("auto", _auto(facts)),
    ):
        say(title, *(f"  {line}" for line in lines))
    say("Kernels")
    for part in _kernels(facts):
        stdout.print(part)
    say("Next: sage demo, the whole path on a small embedded model")


def _plan(text: str, facts: DeviceFacts, seq_len: list[str], card: str | None) -> None:
    """Show what the modules of a script or model will run on."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--plan {text}: {error}") from None
    path = Path(words[0] if words else "")
    if path.suffix != ".py":
        run_plan = _plan_of_model(path, facts, seq_len)
        say(run_plan.text())
        say(f"Next: {_next_of(run_plan, path, seq_len, card)}")
        return
    if card is not None:
        raise UsageError(f"--as plans a model, not the script {path}, which runs here")
    from sage_plugin.capture.recording.script_plan import plan_script

    say(plan_script(path, words[1:]).text())
    say(f"Next: sage capture {text}, and sage tune on what it records")


def _plan_of_model(path: Path, facts: DeviceFacts, seq_len: list[str]) -> RunPlan:
    from sage_plugin.plugin.options.checked import checked_options
    from sage_plugin.plugin.plan.model_calls import CallWishes, calls_of, read_config
    from sage_plugin.plugin.plan.run_plan import RunPlan, planned

    options = checked_options()
    wishes = CallWishes(tuple(lengths(seq_len)) if seq_len else ())
    rows = [
        row
        for call in calls_of(read_config(path), wishes)
        for number in range(call.layers)
        for row in planned(f"{call.kind}.{number}", call.shape, options, facts)
    ]
    return RunPlan(tuple(rows), facts.name)


def _next_of(run_plan: RunPlan, path: Path, seq_len: list[str], card: str | None) -> str:
    """What to do about a model's plan: tune its defaults, run it, or nothing."""
    sources = {row.found.source for row in run_plan.rows if row.found is not None}
    if not any(row.kernel for row in run_plan.rows):
        return "nothing to tune; the reasons say why its own attention is used"
    if "default" not in sources:
        return "your pipeline; sage_plugin.patch(pipe) uses these configs"
    length = [word for one in seq_len for word in ("--seq-len", one)]
    where = "" if card is None else " on that card"
    tune = command_line("tune", "--model", path, *length)
    return f"{tune}{where}, for the calls that get a default config"


def _verdict(facts: DeviceFacts) -> str:
    """What a patched pipeline does on this machine, in one sentence."""
    from sage_plugin.kernels.attention import dispatch

    if facts.kind == "cpu":
        return (
            "This machine: no GPU. Kernels are emulated, and patch(pipe) leaves attention to torch."
        )
    (large,) = ShapeOptions(seq_len=[f"{2**16}"], num_heads=HEADS, head_dim=HEAD_DIMS[-1]).shapes()
    decision = dispatch.decide(large, facts)
    if decision.reason is not None:
        return f"{facts.name}: patch(pipe) leaves attention to torch, since {decision.reason}."
    return f"{facts.name}: patch(pipe) runs long calls on {decision.label}."


def _device(facts: DeviceFacts) -> Iterator[str]:
    yield f"{facts.name} ({facts.slug}), {facts.arch}"
    if facts.kind == "cpu":
        yield f"no GPU that torch sees; kernels are {EMULATED}"
        return
    gib = facts.memory_bytes / 2**30
    yield f"{gib:.0f} GiB, {facts.sm_count} multiprocessors, {facts.smem_bytes // 1024} KiB shared"
    yield f"FP8 type of its matrix units: {facts.fp8_dtype or 'none'}"


def _versions() -> Iterator[str]:
    from sage_plugin import device as devices

    tools = devices.toolchain()
    yield f"sage_plugin {tools.sage_plugin}, Python {tools.python}, {platform.platform()}"
    yield ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    yield f"driver {tools.driver or 'none'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _environment() -> Iterator[str]:
    from sage_plugin import settings

    given = settings.given()
    yield ", ".join(f"{name}={value}" for name, value in given.items()) or "nothing is set"


def _configs(facts: DeviceFacts) -> Iterator[str]:
    from sage_plugin import device as devices
    from sage_plugin.registry import load, staleness

    found = load.files_in_use(facts.slug)
    for label, path in load.search_path(facts.slug):
        if label not in dict(found):
            yield f"{label}: none ({path.parent})"
    for label, path in found:
        try:
            entries = load.read(path).entries
        except ConfigError as error:
            yield f"{label}: not readable: {error}"
            continue
        kernels = sorted({f"{one.key.kernel}:{one.key.variant}" for one in entries})
        calls = number_of(len(entries), "tuned call")
        stale = sum(
            bool(staleness.changes(one, devices.toolchain(one.key.family))) for one in entries
        )
        other = f", {stale} with other software" if stale else ""
        yield f"{label}: {calls} of {', '.join(kernels)}{other} ({path})"


def _auto(facts: DeviceFacts) -> Iterator[str]:
    from sage_plugin.kernels import support
    from sage_plugin.kernels.attention import dispatch

    for dim in (*HEAD_DIMS, WIDEST):
        (large,) = ShapeOptions(seq_len=[f"{2**16}"], num_heads=HEADS, head_dim=dim).shapes()
        decision = dispatch.decide(large, facts)
        line = f"{dim} channels: {decision.label}"
        line += "" if decision.reason is None else f", since {decision.reason}"
        small = dataclasses.replace(large, seq_q=1, seq_k=1)
        left = dispatch.decide(small, facts).reason
        if decision.reason is None and left == dispatch.TOO_SMALL:
            fewest = support.fewest_operations(facts.arch, dim)
            causal, others = (support.fewest_tokens(facts.arch, causal=c) for c in (True, False))
            tokens = round((fewest / (4 * HEADS * dim)) ** 0.5, -2)
            line += (
                f"; calls under {fewest:.2g} operations, {tokens:.0f} tokens of {HEADS} heads, "
                f"those under {others} tokens and causal ones under {causal} tokens are the host's"
            )
        yield line


def _kernels(facts: DeviceFacts) -> Iterator[RenderableType]:
    """What each kernel runs as, the tile of its default config, and why others do not run."""
    from rich.text import Text

    from sage_plugin.cli.tables import Column, fitted
    from sage_plugin.kernels.attention.support_row import support

    found = {
        kernel: [support(kernel, facts, head_dim=dim) for dim in HEAD_DIMS] for kernel in KERNELS
    }

    def runs_as(kernel: str) -> str:
        return ", ".join(dict.fromkeys(one.variant for one in found[kernel] if one.variant)) or "-"

    tiles: list[Column[str]] = [
        (f"tile at {dim} channels", lambda kernel, at=at: _tile(found[kernel][at]))  # type: ignore[misc]
        for at, dim in enumerate(HEAD_DIMS)
    ]
    columns: list[Column[str]] = [("runs as", runs_as), *tiles]
    yield from fitted(KERNELS, ("kernel", str), [columns], stdout.width, padding=1)
    for kernel, (first, *_) in found.items():
        if first.reason:
            yield Text(f"{kernel}: {first.reason}")


def _tile(found: Support) -> str:
    launch = found.launch
    return "-" if launch is None else f"{launch.block_m}x{launch.block_n}, {launch.num_warps} warps"
