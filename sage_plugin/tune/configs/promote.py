"""From a study's trials to a verdict: which config wins, by how much for sure, and its evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sage_plugin.errors import ConfigError
from sage_plugin.measure.clocks import stamp
from sage_plugin.registry.entries import entry_of
from sage_plugin.schema import AnyEntry, AnyLaunch, EntryEvidence, Trial
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.search.search import error_of

TUNED, CONFIRMED, FAILED = "tuned", "confirmed", "failed"
NO_BASELINE_GAIN = 1.0
"""Gain over a default that cannot be used at all."""


@dataclass(frozen=True, slots=True)
class StudyVerdict:
    """What a study came to.

    Attributes:
        kind: `"tuned"`, `"confirmed"` (the default stays) or `"failed"` (nothing may run).
        entry: what goes into the registry; `None` where the study failed.
        reason: one sentence where it failed.
    """

    kind: str
    entry: AnyEntry | None = None
    reason: str = ""


def decide(
    study: Study,
    screens: Mapping[AnyLaunch, Trial],
    finals: Mapping[AnyLaunch, Trial],
    *,
    min_gain: float,
    run: str,
) -> StudyVerdict:
    """Choose between the default and the finalists.

    A winner is a config whose gain over the default is above `min_gain` even at the lower end of
    its interval, and above what the default gains over itself. Otherwise the default stays. The
    config that the registry holds now keeps its place against one that is not surely faster.
    """
    raced = [trial for trial in finals.values() if trial.status == "ok" and trial.time]
    if not raced:
        return StudyVerdict(FAILED, reason=failure_summary(screens.values(), finals.values()))
    default = finals.get(study.default)
    if default is None or default.status != "ok":
        return StudyVerdict(TUNED, _entry(study, _fastest(raced), None, screens, run))
    needed = max(min_gain, abs(default.extra.get("aa_ratio", 1.0) - 1))
    better = [t for t in raced if t is not default and t.extra.get("gain_low", 0.0) > needed]
    if not better:
        return StudyVerdict(CONFIRMED, _entry(study, default, default, screens, run))
    return StudyVerdict(TUNED, _entry(study, _prefer_incumbent(better), default, screens, run))


def failure_summary(screens: Collection[Trial], finals: Collection[Trial]) -> str:
    """Sum up why no config of a study may win: failures by class with counts and an example."""
    classes: dict[str, list[str]] = {}
    for trial in (*screens, *finals):
        if trial.status != "ok":
            classes.setdefault(trial.status, []).append(trial.reason)
    told = [f"{len(reasons)} {status} ({reasons[0][:200]})" for status, reasons in classes.items()]
    sound = [trial for trial in screens if trial.status == "ok"]
    errors = [error for trial in sound if (error := error_of(trial)) is not None]
    if errors and not finals:
        told.append(f"{len(errors)} beyond --max-error (the most exact has {min(errors):.4g})")
    return ", ".join(told)


def _fastest(trials: list[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.time.median_ms if trial.time else float("inf"))


def _prefer_incumbent(better: list[Trial]) -> Trial:
    best = _fastest(better)
    if best.extra.get("gain_low_over_incumbent", 1.0) > 0:
        return best
    incumbents = [trial for trial in better if trial.extra.get("incumbent")]
    return incumbents[0] if incumbents else best


def _entry(
    study: Study,
    winner: Trial,
    default: Trial | None,
    screens: Mapping[AnyLaunch, Trial],
    run: str,
) -> AnyEntry:
    confirmed = winner is default
    key, time, errors = study.key, winner.time, screens[winner.config].errors
    assert time is not None
    if errors is None:
        raise ConfigError(
            f"the ledger says that {winner.config.text()} passed the gate and holds no errors of "
            "it: it was changed since; tune again with --fresh"
        )
    gain_low = NO_BASELINE_GAIN if default is None else winner.extra.get("gain_low", 0.0)
    finished_at, throttled = winner.extra.get("finished_at", 0.0), winner.extra.get("throttled")
    evidence = EntryEvidence(
        time=time,
        baseline_time=default.time if default is not None and default.time else time,
        baseline=study.default.text() if default else f"unusable: {study.default.text()}",
        gain_low=0.0 if confirmed else gain_low,
        errors=errors,
        synthetic=study.synthetic,
        inputs=tuple(source.label for source in study.sources),
        run=run,
        toolchain=study.toolchain,
        date=datetime.fromtimestamp(finished_at, UTC).date().isoformat(),
        confirmed=confirmed,
        stamp="throttled" if throttled else stamp(winner.extra.get("aa_ratio"), None, None),
        host_time=winner.host_time,
    )
    rounded = EntryEvidence.from_json(_rounded(evidence.to_json()))
    return entry_of(key, winner.config, rounded)


def _rounded(value: object) -> object:
    """Floats to six significant digits: more is noise, and noise in a diff."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
