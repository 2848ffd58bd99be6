"""What the child does with a candidate: run it through `attention()`, judge it, time it.

The only module of `tune` that touches a device. Inputs and exact outputs stay in the process for
the next candidate of the same study.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sage_plugin.accuracy.gate import failures, worst
from sage_plugin.families.family import ReplayCall
from sage_plugin.kernels.contract import Decision
from sage_plugin.measure import clocks
from sage_plugin.measure.statistics import gain_interval
from sage_plugin.measure.timing import Samples, measure
from sage_plugin.replay.inputs import runs
from sage_plugin.schema import AnyLaunch, Timing, Trial
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.run.study import Problem
from sage_plugin.tune.search.elimination import (
    AGAIN,
    BASE,
    LOOKS,
    Elimination,
    aa_ratio,
    win_confidence,
)

HOST_CALL = "host"
ASIDE_ROUNDS, ASIDE_SHARE = 10, 0.2
"""Rounds and part of a race's time for what is only reported: the kernel alone, the host's call."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The inputs of a study on its device, with their hashes as they were loaded."""

    judged: tuple[ReplayCall, ...]
    timed: ReplayCall
    fingerprints: tuple[int, ...]

    def changed(self) -> bool:
        """Tell whether the inputs were written into since they were loaded."""
        return self.fingerprints != _fingerprints(self.judged, self.timed)


_loaded_study: tuple[str, Loaded] | None = None


@dataclass(frozen=True, slots=True)
class JudgeJob:
    """Run one config on all inputs and hold it to the gate."""

    problem: Problem
    config: AnyLaunch

    def __call__(self) -> Trial:
        """Run in the child."""
        loaded = _loaded(self.problem)
        decision = _decision(self.problem)
        errors = worst([judged.errors(decision, self.config) for judged in loaded.judged])
        broken = failures(self.problem.gate, errors)
        trial = Trial(self.problem.id, self.config, "screen", "ok", errors=errors)
        if loaded.changed():
            return _mutated(trial)
        if broken:
            return dataclasses.replace(trial, status="gate_failed", reason="; ".join(broken))
        return trial


@dataclass(frozen=True, slots=True)
class ScreenJob:
    """Briefly time what passed its gate; `base` is what the times are compared with."""

    problem: Problem
    judged: tuple[Trial, ...]
    base: AnyLaunch | None

    def __call__(self) -> tuple[Trial, ...]:
        """Run in the child."""
        problem, timer = self.problem, self.problem.timer
        loaded = _loaded(problem)
        configs = {f"{i}": trial.config for i, trial in enumerate(self.judged)}
        if self.base is not None and self.base not in configs.values():
            configs["base"] = self.base
        samples = measure(
            {name: _call(problem, loaded.timed, config) for name, config in configs.items()},
            device=problem.device,
            method=timer.method,
            warmup=1,
            min_samples=timer.screen_rounds,
            max_samples=timer.screen_rounds,
            budget_s=timer.screen_s * len(configs),
        )
        if loaded.changed():
            if len(self.judged) == 1:
                return (_mutated(self.judged[0]),)
            _forget()
            raise RuntimeError("a config of a batch wrote into its inputs while it was timed")
        return screened(self.judged, self.base, {configs[n]: s for n, s in samples.items()})


def screened(
    judged: tuple[Trial, ...], base: AnyLaunch | None, samples: Mapping[AnyLaunch, Samples]
) -> tuple[Trial, ...]:
    """Judged trials with their times, and the ratio to the base of the same rounds."""
    return tuple(
        dataclasses.replace(
            trial,
            time=samples[trial.config].timing(),
            extra={**trial.extra, "ratio": _ratio(samples, trial.config, base)},
        )
        for trial in judged
    )


@dataclass(frozen=True, slots=True)
class RaceJob:
    """Time the finalists of a study interleaved, the first one twice; then the host's attention."""

    problem: Problem
    race: Race

    def __call__(self) -> tuple[Trial, ...]:
        """Run in the child."""
        problem, race, timer = self.problem, self.race, self.problem.timer
        loaded = _loaded(problem)
        calls = {f"{i}": _call(problem, loaded.timed, c) for i, c in enumerate(race.configs)}
        before = clocks.snapshot(problem.device)
        samples = measure(
            {**calls, AGAIN: _call(problem, loaded.timed, race.configs[0])},
            device=problem.device,
            method=timer.method,
            min_samples=LOOKS[-1],
            max_samples=LOOKS[-1],
            budget_s=race.budget_s * (1 - ASIDE_SHARE),
            seed=race.seed,
            keep=elimination_of(problem, race),
        )
        after = clocks.snapshot(problem.device)
        throttled = clocks.stamp(1.0, before, after) == "throttled"
        finals = finals_of(problem, race, samples, throttled)
        finals = _with_asides(problem, race, finals, loaded.timed)
        if loaded.changed():
            _forget()
            raise RuntimeError("a finalist wrote into its inputs while it was timed")
        return finals


def elimination_of(problem: Problem, race: Race) -> Elimination:
    """The rule by which finalists leave a race."""
    challengers = tuple(f"{i}" for i in range(1, len(race.configs)))
    return Elimination(challengers, race.min_gain, problem.timer.race_rounds)


def finals_of(
    problem: Problem, race: Race, samples: Mapping[str, Samples], throttled: bool
) -> tuple[Trial, ...]:
    """One trial per finalist from the samples of their race."""
    confidence = win_confidence(len(race.configs) - 1)
    ms = {name: one.ms for name, one in samples.items()}
    shared = {"aa_ratio": aa_ratio(ms), "throttled": float(throttled)}
    if race.min_gain is not None:
        shared["min_gain"] = race.min_gain
    held = race.configs.index(race.incumbent) if race.incumbent in race.configs else None
    finals = []
    for i, config in enumerate(race.configs):
        name, extra = f"{i}", dict(shared)
        gain = _paired(ms[BASE], ms[name], confidence)
        extra |= dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True))
        if held is not None:
            against = _paired(ms[f"{held}"], ms[name], 0.95)
            extra |= {"gain_low_over_incumbent": against[1], "incumbent": float(i == held)}
        timing = samples[name].timing()
        finals.append(Trial(problem.id, config, "final", "ok", time=timing, extra=extra))
    return tuple(finals)


def _paired(
    base: tuple[float, ...], new: tuple[float, ...], confidence: float
) -> tuple[float, float, float]:
    """The gain in the rounds that both took part in."""
    both = min(len(base), len(new))
    return gain_interval(base[:both], new[:both], confidence)


def _with_asides(
    problem: Problem, race: Race, finals: tuple[Trial, ...], timed: ReplayCall
) -> tuple[Trial, ...]:
    """Add the time of the host's attention, and of the kernels alone that may be written."""
    fastest = min(finals, key=lambda t: (-t.time.n, t.time.median_ms) if t.time else (0, 0.0))
    calls: dict[str, Callable[[], object]] = {}
    if problem.device != "cpu":
        for config in dict.fromkeys((race.configs[0], race.incumbent, fastest.config)):
            if config in race.configs:
                split = timed.split(_decision(problem), config, problem.facts)
                calls[config.text()] = split.alone
    host = _call(problem, timed, None)
    if runs(host):
        calls[HOST_CALL] = host
    if not calls:
        return finals
    samples = measure(
        calls,
        device=problem.device,
        method=problem.timer.method,
        min_samples=ASIDE_ROUNDS,
        max_samples=ASIDE_ROUNDS,
        budget_s=race.budget_s * ASIDE_SHARE,
        seed=race.seed,
    )
    times: dict[str, Timing] = {name: one.timing() for name, one in samples.items()}
    return tuple(
        dataclasses.replace(
            trial, kernel_time=times.get(trial.config.text()), host_time=times.get(HOST_CALL)
        )
        for trial in finals
    )


def _loaded(problem: Problem) -> Loaded:
    global _loaded_study
    if _loaded_study is None or _loaded_study[0] != problem.id:
        _forget()  # the old tensors go before the new ones come
        judged = tuple(source.load(problem.device) for source in problem.sources)
        at = problem.sources.index(problem.timed)
        timed = problem.timed.timed(judged[at], problem.device)
        _loaded_study = (problem.id, Loaded(judged, timed, _fingerprints(judged, timed)))
    return _loaded_study[1]


def _forget() -> None:
    global _loaded_study
    _loaded_study = None


def _fingerprints(judged: tuple[ReplayCall, ...], timed: ReplayCall) -> tuple[int, ...]:
    return tuple(number for one in (*judged, timed) for number in one.fingerprints())


def _mutated(trial: Trial) -> Trial:
    """The verdict on a candidate that wrote into its inputs; they are loaded anew for the next."""
    _forget()
    return dataclasses.replace(
        trial, status="mutates_input", reason="its inputs were not the same after the run"
    )


def _decision(problem: Problem) -> Decision:
    return Decision(problem.key.kernel, problem.key.variant)


def _call(problem: Problem, timed: ReplayCall, config: AnyLaunch | None) -> Callable[[], object]:
    """The call as a patched model makes it, with quantization; the baseline without a config."""
    return timed.whole(None if config is None else _decision(problem), config)


def _ratio(
    samples: Mapping[AnyLaunch, Samples], config: AnyLaunch, base: AnyLaunch | None
) -> float:
    new = samples[config].ms
    if base is None:
        return statistics.median(new)
    if base == config:
        return 1.0
    return statistics.median(n / b for n, b in zip(new, samples[base].ms, strict=True))
