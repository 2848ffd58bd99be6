"""Which config to try next, when to stop, and which ones deserve the race; numbers only."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sage_plugin.schema import LaunchConfig, Trial

FINALISTS = 4
"""Configs in the race beside the default."""

SCREEN_BAND = 1.06
"""A config this much slower than the screen's best is not raced; wider than a screen's noise."""

IMPROVEMENT = 0.005
"""Relative gain that counts as an improvement for the early stop."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a search ends before its space does; `None` never.

    Attributes:
        max_trials: configs tried in a study, the default included.
        patience: valid trials in a row without a relative improvement; failures do not count.
        budget_s: seconds for the whole command.
    """

    max_trials: int | None = None
    patience: int | None = None
    budget_s: float | None = None


def order(
    space: Sequence[LaunchConfig], incumbent: LaunchConfig | None, seed: int
) -> list[LaunchConfig]:
    """List the default, what the registry holds now, then the rest in a seeded order.

    Shuffled, because a search that is cut short by its budget must not leave a corner out.
    """
    first = [space[0]]
    if incumbent is not None and incumbent != space[0]:
        first.append(incumbent)
    rest = [config for config in space if config not in first]
    random.Random(seed).shuffle(rest)
    return first + rest


def ratio(trial: Trial) -> float:
    """Return the time relative to the default of the same measurement; infinite if it failed."""
    return trial.extra.get("ratio", float("inf")) if trial.status == "ok" else float("inf")


def exhausted(trials: Iterable[Trial], limits: SearchLimits) -> bool:
    """Tell whether the trials so far, in their order, end the search."""
    if limits.max_trials is None and limits.patience is None:
        return False
    done, best, stale = 0, float("inf"), 0
    for trial in trials:
        done += 1
        if trial.status != "ok":
            continue
        stale += 1
        if ratio(trial) < best * (1 - IMPROVEMENT):
            stale = 0
        best = min(best, ratio(trial))
    over = limits.max_trials is not None and done >= limits.max_trials
    return over or (limits.patience is not None and stale >= limits.patience)


def finalists(
    screens: Mapping[LaunchConfig, Trial],
    default: LaunchConfig,
    incumbent: LaunchConfig | None,
) -> tuple[LaunchConfig, ...]:
    """List the configs to race, the default first if it may run; empty if none may.

    The few best of the screen, of many only those within its band, and what the registry holds now,
    since an entry is only replaced by what beats it in the same race.
    """
    valid = sorted((t for t in screens.values() if t.status == "ok"), key=ratio)
    if not valid:
        return ()
    challengers = [trial for trial in valid if trial.config != default]
    if len(challengers) > FINALISTS:
        band = ratio(valid[0]) * SCREEN_BAND
        challengers = [trial for trial in challengers if ratio(trial) <= band]
    chosen = [trial.config for trial in challengers[:FINALISTS]]
    usable = {t.config for t in valid}
    if incumbent in usable and incumbent != default and incumbent not in chosen:
        chosen.append(incumbent)
    return (default, *chosen) if default in usable else tuple(chosen)


def edges(config: LaunchConfig, space: Sequence[LaunchConfig]) -> tuple[str, ...]:
    """Name the numeric fields in which a config is the smallest or largest of its space."""
    found = []
    for name, value in config.to_json().items():
        values = sorted({getattr(other, name) for other in space})
        if isinstance(value, bool) or not isinstance(value, int) or len(values) < 3:
            continue
        for extreme, word in ((values[0], "smallest"), (values[-1], "largest")):
            if value == extreme and value != 0:
                found.append(f"{name} {value} is the {word} that was searched")
    return tuple(found)
