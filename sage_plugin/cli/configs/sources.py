"""What commands take as tuned configs: a file, a folder of configs, or the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sage_plugin.errors import UsageError
from sage_plugin.schema import RegistryFile

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Names in tuning_runs, folders of runs, or their results.json."
    ),
]


def files_of(path: Path) -> list[RegistryFile]:
    """Read all tuned configs of a path: a run, by its name or its results, or files of configs."""
    from sage_plugin.registry import load
    from sage_plugin.registry.validate import registry_files
    from sage_plugin.tune.configs.plan import RUNS
    from sage_plugin.tune.held import results
    from sage_plugin.tune.run.run_folder import RESULTS

    run = path.parent if path.name == RESULTS else path
    for folder in (run, RUNS / run):
        if results.is_run(folder):
            return [results.read(folder)]
    return [load.read(file) for file in registry_files(path)]


def destination(config_dir: Path | None) -> Path:
    """The folder of configs that is written to: the one that was named, or the user's."""
    from sage_plugin.registry import load

    root = config_dir or load.user_dir()
    if root is None:
        raise UsageError("no folder for configs: install platformdirs, or give --config-dir")
    return root.expanduser()
