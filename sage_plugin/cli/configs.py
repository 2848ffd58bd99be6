"""`sage configs`: which tuned configs there are, why a call gets its own, and are they sound."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import say, stdout
from sage_plugin.cli.options import (
    ConfigDir,
    Device,
    ShapeOptions,
    check_config_dir,
    examples,
    flattened,
)
from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.schema import CallKey, CallShape, DeviceFacts, RegistryEntry, RegistryFile

if TYPE_CHECKING:
    from rich.console import Group

PROBLEMS = 2

app = typer.Typer(no_args_is_help=True, help="Tuned launch configs: list, explain, check.")

All = Annotated[bool, typer.Option("--all", help="Configs of all devices.")]
Place = Annotated[Path | None, typer.Argument(help="File or folder (default: all in use).")]
Kernel = Annotated[str, typer.Option(help="Kernel, or kernel:variant.")]


@app.command("list")
def list_configs(config_dir: ConfigDir = None, device: Device = None, every: All = False) -> None:
    """Show the tuned configs that this device uses."""
    from sage_plugin import device as devices
    from sage_plugin.registry import load

    check_config_dir(config_dir)
    facts = devices.chosen(device)[1]
    shown = 0
    places = load.search_path(facts.slug, config_dir=config_dir)
    for label, path in places:
        for file_path in sorted(path.parents[1].glob("*/*.json")) if every else [path]:
            if file_path.exists():
                _show_file(label, file_path)
                shown += 1
    if not shown:
        whose = "any device" if every else f"{facts.name} ({facts.slug})"
        say(f"No tuned configs for {whose}; calls use the defaults. Looked in:")
        say(*(f"  {label}: {path.parents[1] if every else path}" for label, path in places))
    say(
        "Next: your pipeline; sage_plugin.patch(pipe) uses them"
        if shown
        else "Next: sage tune captured_inputs, of a recording that sage capture made"
    )


@app.command(epilog=examples("sage configs explain -b 1 -hq 8 -sq 4096 -d 128 --kernel sage"))
@flattened
def explain(
    shape: ShapeOptions,
    kernel: Kernel = "auto",
    config_dir: ConfigDir = None,
    device: Device = None,
) -> None:
    """Say why a call gets its launch config, place by place."""
    from sage_plugin import device as devices

    if not shape.seq_len:
        raise UsageError("which call? Give its length (--seq-len), heads (-hq) and channels (-d)")
    check_config_dir(config_dir)
    _, facts = devices.chosen(device)
    for call in shape.shapes():
        _explain_call(call, kernel, facts, config_dir)


def _explain_call(
    shape: CallShape, kernel: str, facts: DeviceFacts, config_dir: Path | None
) -> None:
    from sage_plugin.families import ATTENTION

    name, variant = ATTENTION.parse_kernel(kernel)
    decision = ATTENTION.decide(shape, facts, kernel=name, variant=variant)
    if decision.reason is not None or decision.variant == "host":
        reason = decision.reason or f"{decision.kernel} is torch's own and has no launch config"
        say(f"This call goes to the host's attention: {reason}.")
        say("Next: name a kernel (--kernel fav3_sage) to see what it would get")
        return
    _explain_key(ATTENTION.call_key(shape, decision), facts, config_dir, shape)


@app.command()
def check(path: Place = None, device: Device = None, config_dir: ConfigDir = None) -> None:
    """Check files, policies too; exit 2 with one sentence for each problem."""
    from sage_plugin import device as devices
    from sage_plugin.plugin.policy import rules as policy

    facts = devices.chosen(device)[1]
    files = list(_files_to_check(path, facts, config_dir))
    found = [sentence for file in files for sentence in _problems_of(file, facts)]
    if found:
        say(*found)
        count = f"{len(found)} problem{'s' * (len(found) > 1)}"
        say(
            f"{count} in {len(files)} file{'s' * (len(files) > 1)}. Next: mend or delete what is "
            "named, tune again"
        )
        raise typer.Exit(PROBLEMS)
    names = ", ".join(map(str, files)) or "no file is in use"
    say(f"Sound: {names}.")
    if path is not None and policy.is_policy(path):
        say(f'Next: sage_plugin.patch(pipe, policy="{path}")')


def _problems_of(file: Path, facts: DeviceFacts) -> list[str]:
    """What is wrong with a file of launch configs, or with a policy."""
    from sage_plugin.errors import ConfigError
    from sage_plugin.families import ATTENTION
    from sage_plugin.plugin.policy import rules as policy
    from sage_plugin.registry.validate import problems

    if not policy.is_policy(file):
        return list(problems(file, facts, illegal=ATTENTION.illegal_reason))
    try:
        policy.read(file)
    except ConfigError as error:
        return [str(error)]
    return []


def _files_to_check(
    path: Path | None, facts: DeviceFacts, config_dir: Path | None
) -> Iterator[Path]:
    from sage_plugin.registry import load
    from sage_plugin.registry.validate import registry_files

    if path is not None:
        if config_dir is not None:
            raise UsageError("give a path or --config-dir, not both")
        folder = path.parent if path.is_file() else path
        if (folder / "manifest.jsonl").exists():
            raise UsageError(
                f"{path} holds captures, not configs; check those with "
                f"sage bench {shlex.quote(str(folder))}"
            )
        yield from registry_files(path)
        return
    for _, place in load.search_path(facts.slug, config_dir=config_dir):
        if place.exists():
            yield place


def _explain_key(
    key: CallKey, facts: DeviceFacts, config_dir: Path | None, shape: CallShape
) -> None:
    from sage_plugin.cli.tune_view import config_text
    from sage_plugin.families import ATTENTION
    from sage_plugin.registry import lookup

    ATTENTION.forget()
    say(f"{key.kernel}:{key.variant} on {facts.name}: {ATTENTION.describe(shape)}")
    sentences = lookup.explain(
        key,
        facts=facts,
        config_dir=config_dir,
        is_legal=lambda config: ATTENTION.illegal_reason(config, key, facts) is None,
    )
    say(*(f"  {sentence}" for sentence in sentences))
    found = ATTENTION.find_launch(
        key, facts, config_dir=None if config_dir is None else str(config_dir)
    )
    say(f"It gets {config_text(found.config)} ({found.source}: {found.detail})")
    say(f"  {found.config.text()}")
    reason = ATTENTION.illegal_reason(found.config, key, facts)
    say("  legal on this device" if reason is None else f"  illegal on this device: {reason}")
    if found.source in ("exact", "env"):
        say("Next: sage bench, to see what it is worth")
    else:
        say(f"Next: {_tune_command(key, shape, config_dir)}")


def _tune_command(key: CallKey, shape: CallShape, config_dir: Path | None) -> str:
    """The command that fills a miss for exactly this call, in the place that was asked first."""
    words = ["sage", "tune", "--kernel", f"{key.kernel}:{key.variant}"]
    numbers = {"-b": shape.batch, "-hq": shape.heads_q, "-sq": shape.seq_q, "-d": shape.head_dim}
    if shape.heads_k != shape.heads_q:
        numbers["-hk"] = shape.heads_k
    if shape.seq_k != shape.seq_q:
        numbers["-sk"] = shape.seq_k
    words += [word for option, number in numbers.items() for word in (option, str(number))]
    words += ["--dtype", shape.dtype, "--layout", shape.layout]
    words += ["--causal"] if shape.causal else []
    words += ["--mask", shape.mask_kind] if shape.mask_kind != "none" else []
    words += ["--config-dir", str(config_dir)] if config_dir is not None else []
    return shlex.join(words)


def _show_file(label: str, path: Path) -> None:
    from sage_plugin.registry import load

    try:
        file = load.read(path)
    except ConfigError as error:
        say(f"{label}: {error}")
        return
    count = len(file.entries)
    say(f"{label}: {path}: {file.device.name}, {count} {'entry' if count == 1 else 'entries'}")
    if file.entries:
        stdout.print(_table(file))


def _table(file: RegistryFile) -> Group:
    from rich.console import Group

    from sage_plugin.cli.tables import Column, fitted
    from sage_plugin.cli.tune_view import config_lines, gain_text, milliseconds
    from sage_plugin.families.attention.labels import lines

    def gain(entry: RegistryEntry) -> str:
        return "default\nkept" if entry.evidence.confirmed else gain_text(entry)

    def origin(entry: RegistryEntry) -> str:
        kind = "synthetic" if entry.evidence.synthetic else "captures"
        return f"{kind} {entry.evidence.date}\ntriton {entry.evidence.toolchain.triton or '-'}"

    label: Column[RegistryEntry] = (
        "call",
        lambda entry: f"{entry.key.kernel}:{entry.key.variant}\n{lines(entry.key)}",
    )
    columns: list[Column[RegistryEntry]] = [
        ("config", lambda entry: config_lines(entry.config)),
        ("time", lambda entry: milliseconds(entry.evidence.time.median_ms)),
        ("gain", gain),
        ("tuned on", origin),
    ]
    return Group(*fitted(file.entries, label, [columns], stdout.width, padding=1))
