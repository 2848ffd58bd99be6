"""`sage configs list`: the tuned configs that a device uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.configs.sources import As, facts_of
from sage_plugin.cli.console import say, stdout
from sage_plugin.cli.options import ConfigDir, Device, check_config_dir
from sage_plugin.errors import ConfigError, number_of

if TYPE_CHECKING:
    from rich.console import Group

    from sage_plugin.schema import AnyEntry, AnyLaunch, RegistryFile

All = Annotated[bool, typer.Option("--all", help="Configs of all devices.")]


def command(
    config_dir: ConfigDir = None, device: Device = None, card: As = None, every: All = False
) -> None:
    """Show the tuned configs that a device uses."""
    from sage_plugin.registry import load

    check_config_dir(config_dir)
    facts = facts_of(device, card, config_dir)
    places = load.search_path(facts.slug, config_dir=config_dir)
    found = load.files_in_use(facts.slug, config_dir)
    if every:
        found = [(label, f) for label, path in places for f in load.files_under(path.parents[1])]
    for label, file_path in found:
        _show_file(label, file_path)
    if not found:
        whose = "any device" if every else f"{facts.name} ({facts.slug})"
        say(f"No tuned configs for {whose}; calls use the defaults. Looked in:")
        say(*(f"  {label}: {path.parents[1] if every else path}" for label, path in places))
    say(
        "Next: your pipeline; sage_plugin.patch(pipe) uses them"
        if found
        else "Next: sage tune captured_inputs, of a recording that sage capture made"
    )


def _show_file(label: str, path: Path) -> None:
    from sage_plugin.registry import load

    try:
        file = load.read(path)
    except ConfigError as error:
        say(f"{label}: {error}")
        return
    count = len(file.entries)
    say(f"{label}: {path}: {file.device.name}, {number_of(count, 'entry', 'entries')}")
    if file.entries:
        stdout.print(_table(file))


def _table(file: RegistryFile) -> Group:
    from rich.console import Group

    from sage_plugin import device as devices
    from sage_plugin.cli.tables import Column, fitted
    from sage_plugin.cli.tune_view import gain_text, time_text
    from sage_plugin.families import family
    from sage_plugin.registry import staleness
    from sage_plugin.registry.config_words import config_lines

    kind = family(file.family)

    def gain(entry: AnyEntry) -> str:
        return "default\nkept" if entry.evidence.confirmed else gain_text(entry)

    def origin(entry: AnyEntry) -> str:
        kind = "synthetic" if entry.evidence.synthetic else "captures"
        stale = ", stale" if staleness.changes(entry, devices.toolchain(entry.key.family)) else ""
        triton = entry.evidence.toolchain.triton or "-"
        return f"{kind} {entry.evidence.date}\ntriton {triton}{stale}"

    label: Column[AnyEntry] = (
        "call",
        lambda entry: f"{entry.key.kernel}:{entry.key.variant}\n{kind.lines(entry.key)}",
    )
    columns: list[Column[AnyEntry]] = [
        ("config", lambda entry: config_lines(entry.config, _default(entry, file))),
        ("time", lambda entry: time_text(entry, entry.evidence.time)),
        ("gain", gain),
        ("tuned on", origin),
    ]
    return Group(*fitted(file.entries, label, [columns], stdout.width, padding=1))


def _default(entry: AnyEntry, file: RegistryFile) -> AnyLaunch | None:
    """What an entry's config is compared with; `None` where there is no default."""
    from sage_plugin.families import family

    try:
        default: AnyLaunch = family(file.family).default_launch(entry.key, file.device)
        return default
    except (ConfigError, KeyError):  # a kernel that is no more
        return None
