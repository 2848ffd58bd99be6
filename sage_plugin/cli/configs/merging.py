"""`sage configs apply` and `merge`: what runs and other files found, into a folder of configs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sage_plugin.cli.configs.sources import destination, files_of, merged_into
from sage_plugin.cli.console import say
from sage_plugin.cli.options import ConfigDir
from sage_plugin.errors import UsageError
from sage_plugin.schema import RegistryFile

Run = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Names in tuning_runs, or folders of runs.")
]
Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="A... INTO",
        help="Files, folders of configs or of runs; the last is the folder that takes them.",
    ),
]
MinGain = Annotated[float, typer.Option(min=0, help="Smallest sure gain worth an entry.")]


def apply(run: Run, config_dir: ConfigDir = None, min_gain: MinGain = 0.01) -> None:
    """Write the winners of runs into your folder of configs, by the rules of tuning."""
    sources = [file for path in run for file in files_of(path)]
    _merge(sources, destination(config_dir), min_gain)


def merge(paths: Paths, min_gain: MinGain = 0.0) -> None:
    """Merge tuned configs into a folder; an entry replaces another only by the rules of tuning."""
    *sources, into = paths
    if not sources:
        raise UsageError(f"merge {into} into what? Give a folder of configs as the last word")
    if into.is_file():
        raise UsageError(f"{into} is a file: give the folder that holds <card>/<family>.json")
    _merge([file for path in sources for file in files_of(path)], into, min_gain)


def _merge(sources: list[RegistryFile], into: Path, min_gain: float) -> None:
    changed = merged_into(into, sources, min_gain)
    say(
        f"Next: sage configs check {into}"
        if changed
        else "Nothing changed. Next: sage configs list, to see what is in use"
    )
