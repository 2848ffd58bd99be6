"""`sage configs apply` and `merge`: what runs and other files found, into a folder of configs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.configs.sources import Runs, destination, files_of
from sage_plugin.cli.console import command_line, say
from sage_plugin.cli.options import ConfigDir
from sage_plugin.errors import UsageError
from sage_plugin.schema import RegistryFile

if TYPE_CHECKING:
    from sage_plugin.registry.merge import MergeReport

Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="A... INTO",
        help="Files, folders of configs or of runs; the last is the folder that takes them.",
    ),
]
Sibling = Annotated[
    str | None,
    typer.Option(
        "--as", metavar="CARD", help="Write them for this card, whose chip is the same; marked so."
    ),
]
MinGain = Annotated[float, typer.Option(min=0, help="Smallest sure gain worth an entry.")]


def apply(run: Runs, config_dir: ConfigDir = None, min_gain: MinGain = 0.01) -> None:
    """Write the winners of runs into your folder of configs, by the rules of tuning."""
    sources = [file for path in run for file in files_of(path)]
    _merge(sources, destination(config_dir), min_gain)


def merge(paths: Paths, min_gain: MinGain = 0.0, card: Sibling = None) -> None:
    """Merge tuned configs into a folder; an entry replaces another only by the rules of tuning."""
    from sage_plugin.registry import cards

    *sources, into = paths
    if not sources:
        raise UsageError(f"merge {into} into what? Give a folder of configs as the last word")
    if into.is_file():
        raise UsageError(f"{into} is a file: give the folder that holds <card>/<family>.json")
    found = [file for path in sources for file in files_of(path)]
    if card is not None:
        sibling = cards.recorded(card, into)
        found = [cards.for_sibling(file, sibling) for file in found]
    _merge(found, into, min_gain)


def _merge(sources: list[RegistryFile], into: Path, min_gain: float) -> None:
    """Merge by the rules, and print what became of each entry."""
    from sage_plugin.registry import load
    from sage_plugin.registry.merge import merge

    changed = 0
    for file in sources:
        path = load.file_path(into, file.device.slug, file.family)
        report = merge(
            path, file.entries, family=file.family, facts=file.device, toolchain=file.toolchain,
            min_gain=min_gain,
        )  # fmt: skip
        _say_report(path, report)
        changed += len(report.added) + len(report.replaced)
    say(
        f"Next: {command_line('configs', 'check', into)}"
        if changed
        else "Nothing changed. Next: sage configs list, to see what is in use"
    )


def _say_report(path: Path, report: MergeReport) -> None:
    from sage_plugin.families import describe_key
    from sage_plugin.registry.merge import ALREADY_THERE

    groups = {"added": report.added, "replaced": report.replaced, "kept": report.kept}
    counts = ", ".join(f"{len(notes)} {word}" for word, notes in groups.items())
    say(f"{path}: {counts}")
    for word, notes in groups.items():
        told = [(key, why) for key, why in notes if why != ALREADY_THERE]
        say(*(f"  {word}: {describe_key(key)}: {why}" for key, why in told))
