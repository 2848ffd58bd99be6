"""The race of a study, settled whatever a finalist does to the process that times it."""

from __future__ import annotations

import dataclasses

from sage_plugin.schema import AnyLaunch, Trial
from sage_plugin.tune.run.runner import Race, Runner
from sage_plugin.tune.run.study import Study

MIN_BUDGET_S = 1.0


def run_final(runner: Runner, study: Study, race: Race) -> dict[AnyLaunch, Trial]:
    """Race the finalists; where the race breaks, race each one alone with the first.

    A process that dies says nothing about which of its configs was to blame. Pairs do, and a pair
    is still an interleaved comparison with the baseline.
    """
    settled = _raced(runner, study, race)
    if all(trial.status == "ok" for trial in settled.values()):
        return settled
    first, *challengers = race.configs
    budget_s = max(MIN_BUDGET_S, race.budget_s / len(race.configs))
    apart = dataclasses.replace(race, incumbent=None, budget_s=budget_s)
    if len(challengers) > 1:
        for challenger in challengers:
            pair = _raced(runner, study, dataclasses.replace(apart, configs=(first, challenger)))
            settled[challenger] = pair[challenger]
            if pair[first].status == "ok":
                settled[first] = pair[first]
    if challengers and settled[first].status != "ok":
        settled |= _raced(runner, study, dataclasses.replace(apart, configs=(first,)))
    return settled


def _raced(runner: Runner, study: Study, race: Race) -> dict[AnyLaunch, Trial]:
    return {trial.config: trial for trial in runner.race(study, race)}
