"""What runs left in their folders, read back: the configs that won, and the times of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sage_plugin.errors import ConfigError
from sage_plugin.registry import load
from sage_plugin.registry.entries import entry_from_json, key_from_json
from sage_plugin.schema import (
    ATTENTION,
    SCHEMA_VERSION,
    AnyKey,
    AnyLaunch,
    DeviceFacts,
    RegistryFile,
    Toolchain,
    Trial,
)
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger

Prices = dict[AnyKey, dict[AnyLaunch, float]]


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run with results."""
    return (path / run_folder.RESULTS).is_file()


def results_of(folder: Path) -> RegistryFile:
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


def times_of(runs: Sequence[Path]) -> tuple[DeviceFacts, Prices]:
    """Read the times of all sound configs of some runs on one card."""
    cards: dict[str, DeviceFacts] = {}
    times: Prices = {}
    for run in runs:
        path = run / run_folder.METADATA
        metadata = run_folder.read(path)
        ledger = Ledger(run / run_folder.LEDGER)
        try:
            facts = DeviceFacts.from_json(metadata["device"])
            studies = [(key_from_json(one["key"]), one["id"]) for one in metadata["studies"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is of no run: no {error}") from None
        cards[facts.slug] = facts
        for key, study in studies:
            if found := _of_study(ledger, study):
                times[key] = found
    if len(cards) != 1:
        raise ConfigError(f"runs of one card are needed, got {', '.join(sorted(cards)) or 'none'}")
    return next(iter(cards.values())), times


def _of_study(ledger: Ledger, study: str) -> dict[AnyLaunch, float]:
    """Return the times of a study's sound configs: of its race if there was one, else its screen.

    A screen's times are taken at different moments: where each has its ratio to the default of the
    same moment, that counts. Both are brought to the scale of the screen's first.
    """
    screens, finals = (
        {config: trial for config, trial in ledger.trials(study, stage).items() if trial.time}
        for stage in ("screen", "final")
    )
    base_ms = next((_ms(trial) for trial in screens.values()), 0.0)
    times = {
        config: trial.extra["ratio"] * base_ms if "ratio" in trial.extra else _ms(trial)
        for config, trial in screens.items()
    }
    anchor = next((config for config in finals if config in times), None)
    if anchor is None:
        return times
    scale = times[anchor] / _ms(finals[anchor])
    return times | {config: _ms(trial) * scale for config, trial in finals.items()}


def _ms(trial: Trial) -> float:
    assert trial.time is not None
    return trial.time.median_ms
