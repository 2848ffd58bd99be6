"""What a run found, read back from its folder as a file of tuned configs."""

from __future__ import annotations

from pathlib import Path

from sage_plugin.errors import ConfigError
from sage_plugin.registry import load
from sage_plugin.registry.entries import entry_from_json
from sage_plugin.schema import ATTENTION, SCHEMA_VERSION, DeviceFacts, RegistryFile, Toolchain
from sage_plugin.tune.run import run_folder


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run with results."""
    return (path / run_folder.RESULTS).is_file()


def read(folder: Path) -> RegistryFile:
    """Read the winners of a run, and the card and software that it ran with."""
    path = folder / run_folder.RESULTS
    results, metadata = run_folder.read(path), run_folder.read(folder / run_folder.METADATA)
    try:
        rows = [row["entry"] for row in results["results"]]
        entries = tuple(entry_from_json(row) for row in rows if row is not None)
        facts = DeviceFacts.from_json(metadata["device"])
        toolchain = Toolchain.from_json(metadata["toolchain"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder} holds no results of a run: no {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    for entry in entries:
        for problem in load.entry_problems(entry):
            raise ConfigError(f"{path}: {problem}")
    family = entries[0].key.family if entries else ATTENTION
    return RegistryFile(SCHEMA_VERSION, family, facts, toolchain, entries)
