"""What the child does with a candidate: run it through `attention()`, judge it, time it.

The only module of `tune` that touches a device. Inputs and exact outputs stay in the process for
the next candidate of the same study.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from sage_plugin.accuracy.gate import failures, worst
from sage_plugin.families.family import ReplayCall
from sage_plugin.kernels.contract import Decision
from sage_plugin.measure import clocks
from sage_plugin.measure.statistics import gain_interval
from sage_plugin.measure.timing import Samples, measure
from sage_plugin.replay.inputs import runs
from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.run.study import Study

BASE, NEW, AGAIN, HOST_CALL = "base", "new", "again", "host"


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
class ScreenJob:
    """Judge and briefly time one config; `base` is what its time is compared with."""

    study: Study
    config: LaunchConfig
    base: LaunchConfig | None

    def __call__(self) -> Trial:
        """Run in the child."""
        loaded = _loaded(self.study)
        decision = _decision(self.study)
        errors = worst([judged.errors(decision, self.config) for judged in loaded.judged])
        broken = failures(self.study.gate, errors)
        trial = Trial(self.study.id, self.config, "screen", "ok", errors=errors)
        if loaded.changed():
            return _mutated(trial)
        if broken:
            return dataclasses.replace(trial, status="gate_failed", reason="; ".join(broken))
        calls = {NEW: _call(self.study, loaded.timed, self.config)}
        if self.base is not None and self.base != self.config:
            calls[BASE] = _call(self.study, loaded.timed, self.base)
        timer = self.study.timer
        samples = measure(
            calls,
            device=self.study.device,
            method=timer.method,
            warmup=1,
            min_samples=timer.screen_rounds,
            max_samples=timer.screen_rounds,
            budget_s=timer.screen_s,
        )
        if loaded.changed():
            return _mutated(trial)
        ratio = _ratio(samples, compared=self.base is not None)
        return dataclasses.replace(trial, time=samples[NEW].timing(), extra={"ratio": ratio})


@dataclass(frozen=True, slots=True)
class RaceJob:
    """Time the finalists of a study interleaved, the first one twice, and the host's attention."""

    study: Study
    race: Race

    def __call__(self) -> tuple[Trial, ...]:
        """Run in the child."""
        study, race, timer = self.study, self.race, self.study.timer
        loaded = _loaded(study)
        calls = {f"{i}": _call(study, loaded.timed, c) for i, c in enumerate(race.configs)}
        calls[AGAIN] = _call(study, loaded.timed, race.configs[0])
        if study.device != "cpu":
            for i, config in enumerate(race.configs):
                calls[f"{i}/kernel"] = loaded.timed.split(
                    _decision(study), config, study.facts
                ).alone
        host = _call(study, loaded.timed, None)
        if runs(host):
            calls[HOST_CALL] = host
        before = clocks.snapshot(study.device)
        samples = measure(
            calls,
            device=study.device,
            method=timer.method,
            min_samples=timer.race_rounds,
            max_samples=timer.race_rounds,
            budget_s=race.budget_s,
            seed=race.seed,
        )
        after = clocks.snapshot(study.device)
        throttled = clocks.stamp(1.0, before, after) == "throttled"
        if loaded.changed():
            raise RuntimeError("a finalist wrote into its inputs while it was timed")
        return _finals(study, race, samples, throttled)


def _finals(
    study: Study, race: Race, samples: dict[str, Samples], throttled: bool
) -> tuple[Trial, ...]:
    """One trial per finalist from the samples of their race."""
    # Several challengers share the risk of a false winner (Bonferroni).
    confidence = 1 - 0.05 / max(1, len(race.configs) - 1)
    base = samples["0"]
    aa_ratio = statistics.median(samples[AGAIN].ms) / statistics.median(base.ms)
    shared = {"aa_ratio": aa_ratio, "throttled": float(throttled)}
    incumbent = race.incumbent
    held = race.configs.index(incumbent) if incumbent in race.configs else None
    finals = []
    for i, config in enumerate(race.configs):
        extra = dict(shared)
        gain = gain_interval(base.ms, samples[f"{i}"].ms, confidence)
        extra |= dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True))
        if held is not None:
            against = gain_interval(samples[f"{held}"].ms, samples[f"{i}"].ms)
            extra |= {"gain_low_over_incumbent": against[1], "incumbent": float(i == held)}
        kernel, host = samples.get(f"{i}/kernel"), samples.get(HOST_CALL)
        finals.append(
            Trial(
                study.id,
                config,
                "final",
                "ok",
                time=samples[f"{i}"].timing(),
                kernel_time=None if kernel is None else kernel.timing(),
                host_time=None if host is None else host.timing(),
                extra=extra,
            )
        )
    return tuple(finals)


def _loaded(study: Study) -> Loaded:
    global _loaded_study
    if _loaded_study is None or _loaded_study[0] != study.id:
        _loaded_study = None  # the old tensors go before the new ones come
        judged = tuple(source.load(study.device) for source in study.sources)
        at = study.sources.index(study.timed)
        timed = study.timed.timed(judged[at], study.device)
        _loaded_study = (study.id, Loaded(judged, timed, _fingerprints(judged, timed)))
    return _loaded_study[1]


def _fingerprints(judged: tuple[ReplayCall, ...], timed: ReplayCall) -> tuple[int, ...]:
    return tuple(number for one in (*judged, timed) for number in one.fingerprints())


def _mutated(trial: Trial) -> Trial:
    """The verdict on a candidate that wrote into its inputs; they are loaded anew for the next."""
    global _loaded_study
    _loaded_study = None
    return dataclasses.replace(
        trial, status="mutates_input", reason="its inputs were not the same after the run"
    )


def _decision(study: Study) -> Decision:
    return Decision(study.key.kernel, study.key.variant)


def _call(study: Study, timed: ReplayCall, config: LaunchConfig | None) -> Callable[[], object]:
    """The call as a patched model makes it, with quantization; the baseline without a config."""
    return timed.whole(None if config is None else _decision(study), config)


def _ratio(samples: dict[str, Samples], *, compared: bool) -> float:
    new = samples[NEW].ms
    if BASE in samples:
        return statistics.median(n / b for n, b in zip(new, samples[BASE].ms, strict=True))
    return 1.0 if compared else statistics.median(new)
