"""What commands of configs are given: a card, and a file, a folder of configs or a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sage_plugin.errors import UsageError
from sage_plugin.schema import DeviceFacts, RegistryFile

As = Annotated[
    str | None,
    typer.Option(
        "--as", metavar="CARD", help="Answer for a card with configs, such as nvidia-h200."
    ),
]
Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Names in tuning_runs, folders of runs, or their results.json."
    ),
]


def facts_of(device: str | None, card: str | None, config_dir: Path | None) -> DeviceFacts:
    """Return the facts of the device here, or those that were recorded for a named card."""
    from sage_plugin import device as devices
    from sage_plugin.registry import cards

    if card is None:
        return devices.chosen(device)[1]
    if device is not None:
        raise UsageError("give --device, which is here, or --as, a card that is not; not both")
    return cards.recorded(card, config_dir)


def files_of(path: Path) -> list[RegistryFile]:
    """Read all tuned configs of a path: a run, by its name or its results, or files of configs."""
    from sage_plugin.registry import load
    from sage_plugin.registry.validate import registry_files
    from sage_plugin.tune.configs.plan import RUNS
    from sage_plugin.tune.held import runs
    from sage_plugin.tune.run.run_folder import RESULTS

    run = path.parent if path.name == RESULTS else path
    for folder in (run, RUNS / run):
        if runs.is_run(folder):
            return [runs.results_of(folder)]
    return [load.read(file) for file in registry_files(path)]


def destination(config_dir: Path | None) -> Path:
    """The folder of configs that is written to: the one that was named, or the user's."""
    from sage_plugin.registry import load

    root = config_dir or load.user_dir()
    if root is None:
        raise UsageError("no folder for configs: install platformdirs, or give --config-dir")
    return root.expanduser()
