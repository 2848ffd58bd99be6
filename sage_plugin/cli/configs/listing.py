"""`sage configs list`: the tuned configs that a device uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.configs.card import As, facts_of
from sage_plugin.cli.console import say, stdout
from sage_plugin.cli.options import ConfigDir, Device
from sage_plugin.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from sage_plugin.schema import LaunchConfig, RegistryEntry, RegistryFile

All = Annotated[bool, typer.Option("--all", help="Configs of all devices.")]


def command(
    config_dir: ConfigDir = None, device: Device = None, card: As = None, every: All = False
) -> None:
    """Show the tuned configs that a device uses."""
    from sage_plugin.registry import load

    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(f"--config-dir {config_dir}: no such folder")
    facts = facts_of(device, card, config_dir)
    shown = 0
    places = load.search_path(facts.slug, config_dir=config_dir)
    for label, path in places:
        for file_path in load.files_under(path.parents[1]) if every else [path]:
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


def _table(file: RegistryFile) -> Table:
    from sage_plugin import device as devices
    from sage_plugin.cli.tables import grid
    from sage_plugin.cli.tune_view import gain_text, milliseconds
    from sage_plugin.families.attention.labels import describe_key
    from sage_plugin.registry import staleness
    from sage_plugin.registry.config_words import config_lines

    table = grid("call", "config", "time", "gain", "tuned on", padding=1)
    for entry in file.entries:
        evidence = entry.evidence
        stale = ", stale" if staleness.changes(entry, devices.toolchain()) else ""
        table.add_row(
            describe_key(entry.key).replace(" ", "\n", 2),
            config_lines(entry.config, _default(entry, file)),
            milliseconds(evidence.time.median_ms),
            "confirmed" if evidence.confirmed else gain_text(entry),
            f"{'synthetic' if evidence.synthetic else 'captures'} {evidence.date}\n"
            f"triton {evidence.toolchain.triton or '-'}{stale}",
        )
    return table


def _default(entry: RegistryEntry, file: RegistryFile) -> LaunchConfig | None:
    """What an entry's config is compared with; `None` where there is no default."""
    from sage_plugin.families import ATTENTION

    try:
        return ATTENTION.default_launch(entry.key, file.device)
    except (ConfigError, KeyError):  # a kernel that is no more
        return None
