"""`sage configs diff`: in what two sets of tuned configs differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.configs.sources import files_of
from sage_plugin.cli.console import command_line, say, stdout
from sage_plugin.errors import number_of

if TYPE_CHECKING:
    from sage_plugin.registry.compare import EntryPair
    from sage_plugin.schema import AnyEntry

First = Annotated[Path, typer.Argument(metavar="A", help="File, folder of configs, or a run.")]
Second = Annotated[Path, typer.Argument(metavar="B", help="What it is compared with.")]


def command(first: First, second: Second) -> None:
    """Show the calls whose configs differ between two files, folders or runs."""
    from sage_plugin.cli.tables import grid
    from sage_plugin.registry.compare import differences

    pairs = differences(files_of(first), files_of(second))
    renewed = [pair for pair in pairs if pair.same_config]
    shown = [pair for pair in pairs if not pair.same_config]
    if shown:
        table = grid("call", padding=1)
        table.add_column("A", no_wrap=True)
        table.add_column("B", no_wrap=True)
        for pair in shown:
            table.add_row(*_cells(pair))
        stdout.print(table)
    only = [sum(getattr(p, side) is None for p in shown) for side in ("second", "first")]
    say(
        f"{number_of(only[0], 'call')} in A alone, {only[1]} in B alone, "
        f"{len(shown) - sum(only)} with another config, {len(renewed)} with other evidence alone"
    )
    if pairs:
        merge = command_line("configs", "merge", first, second)
        say(f"Next: {merge}, which takes what wins by the rules")


def _cells(pair: EntryPair) -> tuple[str, str, str]:
    from sage_plugin.families import family

    key = pair.key
    call = f"{key.kernel}:{key.variant}\n{family(key.family).lines(key)}\n{pair.slug}"
    return call, _side(pair.first, pair.second), _side(pair.second, pair.first)


def _side(entry: AnyEntry | None, other: AnyEntry | None) -> str:
    from sage_plugin.cli.tune_view import time_text
    from sage_plugin.registry.config_words import config_lines

    if entry is None:
        return "-"
    config = config_lines(entry.config, None if other is None else other.config)
    time = time_text(entry, entry.evidence.time)
    return f"{config}\n{time} {entry.evidence.stamp}".strip()
