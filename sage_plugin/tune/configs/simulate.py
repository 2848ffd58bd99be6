"""A recorded ledger in place of a device: how good the search is, and how much it measures.

A candidate takes its recorded time with the noise that its recorded interval tells of, drawn anew
for each sample: ledgers keep medians and intervals, not samples. Noise is independent from sample
to sample, which is kinder than a GPU at its power limit.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_plugin.accuracy.gate import Gate
from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.families import family
from sage_plugin.measure.timing import Keep, Samples, TimingLimits, interleave
from sage_plugin.registry import entries
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import (
    AnyKey,
    AnyLaunch,
    DeviceFacts,
    JsonRecord,
    Timing,
    Toolchain,
    Trial,
)
from sage_plugin.tune.configs import promote
from sage_plugin.tune.configs.inputs import TuningInputs
from sage_plugin.tune.configs.plan import TuningRequest
from sage_plugin.tune.configs.study_search import Notebook, StudySearch
from sage_plugin.tune.configs.trial import elimination_of, finals_of, screened
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.run.observer import Observer
from sage_plugin.tune.run.runner import Race, Resources
from sage_plugin.tune.run.study import Study, Timer
from sage_plugin.tune.search.elimination import AGAIN, LOOKS
from sage_plugin.tune.search.search import ratio

REPEATS = 100
"""Searches of a recorded study, and of a space whose configs are alike."""

FEWEST = 4
"""Valid configs without which there is nothing to search."""

RANGE_FACTORS = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326}
"""Mean range of so many normal samples, in standard deviations; their interval is their range."""

MEDIAN_FACTOR = 2 * 1.96 * 1.2533
"""Width of the 95 % interval of a median of many normal samples, times the root of their number."""


class SimulatedRunner:
    """Candidates take `times[config]` and fail as recorded; counts what it times.

    Args:
        recorded: what a ledger says of each config.
        times: true time of a config; 1 is that of the default.
        noise: relative standard deviation of a sample.
        seed: of the noise.
    """

    def __init__(
        self,
        recorded: Mapping[AnyLaunch, Trial],
        times: Mapping[AnyLaunch, float],
        noise: float,
        seed: int,
    ) -> None:
        self.launches = 0
        self._recorded, self._times, self._noise = recorded, times, noise
        self._random = random.Random(seed)

    def prepare(self, study: Study, configs: Sequence[AnyLaunch]) -> Mapping[AnyLaunch, Resources]:
        """Do nothing: what was recorded is compiled."""
        return {}

    def judge(self, study: Study, config: AnyLaunch) -> Trial:
        """Answer with what was recorded, but for its time."""
        trial = self._recorded[config]
        extra = {name: value for name, value in trial.extra.items() if name != "ratio"}
        return dataclasses.replace(trial, study=study.id, time=None, extra=extra)

    def screen(
        self, study: Study, judged: Sequence[Trial], base: AnyLaunch | None
    ) -> tuple[Trial, ...]:
        """Draw times for a batch."""
        configs = {f"{i}": trial.config for i, trial in enumerate(judged)}
        if base is not None and base not in configs.values():
            configs["base"] = base
        samples = self._drawn(configs, study.timer.screen_rounds)
        return screened(tuple(judged), base, {configs[n]: one for n, one in samples.items()})

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        """Draw times for finalists until the rule ends the race."""
        configs = {f"{i}": config for i, config in enumerate(race.configs)}
        configs[AGAIN] = race.configs[0]
        samples = self._drawn(configs, LOOKS[-1], keep=elimination_of(study.problem, race))
        return finals_of(study.problem, race, samples, throttled=False)

    def cancel(self) -> None:
        """Do nothing: nothing runs."""

    def close(self) -> None:
        """Do nothing: nothing was started."""

    def _drawn(
        self, configs: Mapping[str, AnyLaunch], rounds: int, keep: Keep | None = None
    ) -> dict[str, Samples]:
        def run_round(names: Sequence[str]) -> list[float]:
            self.launches += len(names)
            noise = (self._random.gauss(0, self._noise) for _ in names)
            return [
                self._times[configs[n]] * math.exp(e) for n, e in zip(names, noise, strict=True)
            ]

        limits = TimingLimits(0, 0.0, rounds, rounds, budget_s=math.inf)
        ms = interleave(list(configs), run_round, limits=limits, keep=keep)
        return {name: Samples(name, tuple(taken), "simulated") for name, taken in ms.items()}


@dataclass(frozen=True, slots=True)
class RecordedStudy:
    """One study of a recorded run.

    Attributes:
        study: what was tuned, its space the configs that the ledger has.
        trials: what became of each config.
        noise: relative standard deviation of a sample.
    """

    study: Study
    trials: dict[AnyLaunch, Trial]
    noise: float

    @property
    def times(self) -> dict[AnyLaunch, float]:
        """Recorded time of each valid config over that of the default."""
        return {config: ratio(t) for config, t in self.trials.items() if t.status == "ok"}


@dataclass(frozen=True, slots=True)
class SimulationResult(JsonRecord):
    """How the search does on a recorded study.

    Attributes:
        study: its hash.
        kernel: `kernel:variant`.
        call: the call, in a few words.
        configs: of the space.
        noise: relative standard deviation of a sample.
        gain: of the best config over the default, as recorded.
        regret: mean loss of what the search chose against the best.
        regret_p95: its 95th percentile.
        within: share of searches at most half a percent from the best.
        tried: mean number of configs that were tried, and so compiled.
        launches: mean number of timed launches.
        exhaustive: launches that time each config as often as finalists.
        false_wins: share of searches with a winner where all configs are alike.
        repeats: searches of each kind.
    """

    study: str
    kernel: str
    call: str
    configs: int
    noise: float
    gain: float
    regret: float
    regret_p95: float
    within: float
    tried: float
    launches: float
    exhaustive: int
    false_wins: float
    repeats: int


def read(path: str | Path) -> list[RecordedStudy]:
    """Read the studies of a run folder, or of the ledger in it, that have enough valid configs."""
    path = Path(path)
    folder = path.parent if path.is_file() else path
    ledger = Ledger(folder / run_folder.LEDGER if path == folder else path)
    metadata = run_folder.read(folder / run_folder.METADATA)
    found = []
    try:
        facts = DeviceFacts.from_json(metadata["device"])
        toolchain = Toolchain.from_json(metadata["toolchain"])
        for one in metadata["studies"]:
            trials = ledger.trials(one["id"], "screen")
            valid = [t for t in trials.values() if 0 < ratio(t) < math.inf]
            if len(valid) >= FEWEST:
                key, gate = entries.key_from_json(one["key"]), Gate.from_json(one["gate"])
                found.append(_recorded(key, gate, facts, toolchain, trials))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder / run_folder.METADATA}: no run's metadata ({error})") from None
    if not found:
        raise UsageError(f"{path}: no study with {FEWEST} valid configs; tune with --exhaustive")
    return found


def simulate(
    recorded: RecordedStudy, request: TuningRequest, *, repeats: int | None = None
) -> SimulationResult:
    """Search a recorded study again and again, and a space of its size whose configs are alike."""
    study, times = recorded.study, recorded.times
    repeats = REPEATS if repeats is None else repeats
    alike = dict.fromkeys(times, 1.0)
    default = recorded.trials.get(study.default)
    allowed = [
        t.config
        for t in recorded.trials.values()
        if t.status == "ok" and request.error_limit.allows(t, default)
    ]
    best = min(times[config] for config in allowed)
    regrets, launches, tried, wins = [], [], [], 0
    for seed in range(repeats):
        chosen, trials, runner = _searched(recorded, times, request, seed)
        regrets.append(times[chosen] / best - 1)
        launches.append(runner.launches)
        tried.append(len(trials))
        wins += _searched(recorded, alike, request, seed)[0] != study.default
    return SimulationResult(
        study=study.id,
        kernel=study.kernel,
        call=study.timed.family.describe(study.timed.shape),
        configs=len(study.space),
        noise=recorded.noise,
        gain=1 - best / times.get(study.default, best),
        regret=statistics.fmean(regrets),
        regret_p95=sorted(regrets)[math.ceil(0.95 * repeats) - 1],
        within=sum(regret <= 0.005 for regret in regrets) / repeats,
        tried=statistics.fmean(tried),
        launches=statistics.fmean(launches),
        exhaustive=len(times) * study.timer.race_rounds,
        false_wins=wins / repeats,
        repeats=repeats,
    )


def request_of(**changes: Any) -> TuningRequest:  # noqa: ANN401
    """Return a request for a simulation: every gain counts, however small."""
    return TuningRequest(TuningInputs(()), min_gain=0.0, **changes)


def _searched(
    recorded: RecordedStudy,
    times: Mapping[AnyLaunch, float],
    request: TuningRequest,
    seed: int,
) -> tuple[AnyLaunch, dict[AnyLaunch, Trial], SimulatedRunner]:
    """One search: what it chose, what it tried, and who counted."""
    runner = SimulatedRunner(recorded.trials, times, recorded.noise, seed)
    own = dataclasses.replace(request, seed=seed)
    search = StudySearch(recorded.study, runner, own, Notebook(Ledger(None), Observer()))
    trials = search.open()
    search.screen(trials)
    finals = search.race(trials)
    verdict = promote.decide(recorded.study, trials, finals, min_gain=request.min_gain, run="")
    assert verdict.entry is not None
    return verdict.entry.config, trials, runner


def _recorded(
    key: AnyKey,
    gate: Gate,
    facts: DeviceFacts,
    toolchain: Toolchain,
    trials: dict[AnyLaunch, Trial],
) -> RecordedStudy:
    shape = family(key.family).shape_of(key)
    inputs = ReplayInputs(shape)
    timer = Timer("simulated").of_space(len(trials))
    study = Study(key, (inputs,), inputs, tuple(trials), gate, timer, "cpu", facts, toolchain)
    sigmas = [_noise(t.time) for t in trials.values() if t.time is not None and t.time.n > 1]
    return RecordedStudy(study, trials, statistics.median(sigmas))


def _noise(time: Timing) -> float:
    """Relative standard deviation of a sample, from the interval of their median."""
    width = (time.high_ms - time.low_ms) / time.median_ms
    if time.n in RANGE_FACTORS:
        return width / RANGE_FACTORS[time.n]
    return width * math.sqrt(time.n) / MEDIAN_FACTOR
