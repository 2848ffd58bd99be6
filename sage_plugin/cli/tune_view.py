"""What a tuning session came to, as tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.cli import tables
from sage_plugin.families import describe
from sage_plugin.registry.config_words import config_lines
from sage_plugin.schema import NO_SPEEDS, AnyEntry, AnyLaunch, Timing
from sage_plugin.tune.configs.outcome import Outcome, with_fronts

if TYPE_CHECKING:
    from sage_plugin.tune.configs.plan import TuningPlan
    from sage_plugin.tune.configs.simulate import SimulationResult
    from sage_plugin.tune.run.study import Study

VERDICT_STYLES = {"tuned": "green", "confirmed": "cyan", "failed": "bold red"}
RESULT_WORDS = {"confirmed": "default kept"}
WRITTEN_WORDS = {"added": "entry written", "replaced": "entry replaced", "kept": "entry kept"}
"""How verdicts and what the registry did are said."""


def outcome_table(outcomes: Sequence[Outcome], *, width: int) -> Group:
    """Show per study what the default takes, what the winner takes, and what became of it."""

    def of_entry(cell: Callable[[AnyEntry], str]) -> Callable[[Outcome], str]:
        return lambda outcome: "-" if outcome.entry is None else cell(outcome.entry)

    times: list[tables.Column[Outcome]] = [
        ("default", of_entry(lambda e: time_text(e, e.evidence.baseline_time))),
        ("best", of_entry(lambda e: time_text(e, e.evidence.time))),
        ("gain", of_entry(gain_text)),
    ]
    found: list[tables.Column[Outcome]] = [
        ("config", _config),
        ("result", _result),
    ]
    label: tables.Column[Outcome] = ("call", lambda o: _call(o.study))
    return Group(*tables.fitted(outcomes, label, [times, found], width))


def _config(outcome: Outcome) -> str:
    """The config that won, with what differs from the default."""
    entry = outcome.entry
    return "-" if entry is None else config_lines(entry.config, outcome.study.default)


def _result(outcome: Outcome) -> Text:
    """What became of a study, of its entry, and of its trials."""
    words = RESULT_WORDS.get(outcome.verdict, outcome.verdict)
    result = Text(words, style=VERDICT_STYLES.get(outcome.verdict, ""))
    written = outcome.written.partition(":")[0]
    valid = f"{outcome.trials.get('ok', 0)} of {sum(outcome.trials.values())} valid"
    lines_below = filter(None, (WRITTEN_WORDS.get(written, written), valid))
    return result.append("".join(f"\n{line}" for line in lines_below), style="not bold default")


def outcome_notes(outcomes: Sequence[Outcome], *, min_gain: float) -> list[str]:
    """Sentences below the table."""
    notes = []
    if outcomes and all(outcome.verdict == "confirmed" for outcome in outcomes):
        notes.append(f"No config was surely faster than the default by {100 * min_gain:g} %.")
    for outcome in outcomes:
        where = f"{outcome.study.kernel} {describe(outcome.study.timed.shape)}"
        notes += [f"{where}: {note}" for note in outcome.notes]
        if outcome.written.startswith("kept") and not outcome.written.endswith("already there"):
            notes.append(f"{where}: {outcome.written}")
        emulated = outcome.study.key.variant in NO_SPEEDS
        stamp = outcome.entry.evidence.stamp if outcome.entry is not None else ""
        if stamp not in ("", "clean") and not emulated:
            notes.append(f"{where}: times are {stamp}")
    if any(outcome.study.key.variant in NO_SPEEDS for outcome in outcomes):
        notes.append(EMULATION_NOTE)
    return notes


def front_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Write what a loss of exactness would buy: the front of time and error of each call."""
    lines = []
    for outcome in with_fronts(outcomes):
        study = outcome.study
        lines.append(f"{study.kernel} {describe(study.timed.shape)}: time and error")
        for point in outcome.front:
            note = "" if point.allowed else "  (too inexact to win: --max-error-ratio)"
            changes = changes_text(point.config, study.default)
            lines.append(f"  {point.ratio:6.3f}  {point.error:.5f}  {changes}{note}")
    return lines


def best_lines(unfinished: Sequence[Outcome]) -> list[str]:
    """Write the best so far of calls that were begun and not decided."""
    lines = []
    for outcome in unfinished:
        study, tried = outcome.study, sum(outcome.trials.values())
        where = f"{study.kernel} {describe(study.timed.shape)}"
        if outcome.best is None:
            lines.append(f"{where}: nothing valid among {tried} so far")
            continue
        if study.key.variant in NO_SPEEDS:
            valid = outcome.trials.get("ok", 0)
            lines.append(f"{where}: {valid} of {tried} so far are valid")
            continue
        config, ratio = outcome.best
        changes = changes_text(config, study.default)
        lines.append(f"{where}: best of {tried} so far takes {ratio:.3f} of the default: {changes}")
    return lines


def simulation_table(results: Sequence[SimulationResult], *, width: int) -> Group:
    """Show how the search does on recorded studies, a row each."""
    columns: list[tables.Column[SimulationResult]] = [
        ("configs", lambda one: f"{one.configs}\nnoise {one.noise:.1%}"),
        ("gain", lambda one: f"{one.gain:.1%}"),
        ("loss", lambda one: f"{one.regret:.2%}\np95 {one.regret_p95:.2%}"),
        ("near", lambda one: f"{one.within:.0%}"),
        ("tried", lambda one: f"{one.tried:.0f}"),
        ("launches", lambda one: f"{one.launches:.0f}\n{one.launches / one.exhaustive:.1%}"),
        ("A/A", lambda one: f"{one.false_wins:.1%}"),
    ]
    label: tables.Column[SimulationResult] = ("call", lambda one: f"{one.kernel}\n{one.call}")
    return Group(*tables.fitted(results, label, [columns], width, padding=1))


def plan_table(plan: TuningPlan, *, width: int) -> Group:
    """Show what `--dry-run` would do, a row per study."""
    columns: list[tables.Column[tuple[Study, int]]] = [
        ("inputs", lambda row: f"{len(row[0].sources)} {_kind(row[0])}"),
        ("calls", lambda row: str(row[1]) if row[1] else "-"),
        ("configs", lambda row: str(len(row[0].space))),
        ("default", lambda row: config_lines(row[0].default)),
    ]
    rows = list(zip(plan.studies, plan.calls, strict=True))
    label: tables.Column[tuple[Study, int]] = ("call", lambda row: _call(row[0]))
    return Group(*tables.fitted(rows, label, [columns], width, padding=1))


def _kind(study: Study) -> str:
    return "synthetic" if study.synthetic else "captured"


def _call(study: Study) -> str:
    """A study's kernel and call, a line each, for narrow columns."""
    return f"{study.kernel}\n{study.timed.family.lines(study.timed.shape)}"


def changes_text(config: AnyLaunch, default: AnyLaunch) -> str:
    """Write the fields of a launch config that are not those of the default."""
    own, other = config.to_json(), default.to_json()
    changed = [f"{name} {value}" for name, value in own.items() if value != other[name]]
    return ", ".join(changed) or "the default"


def gain_text(entry: AnyEntry) -> str:
    """Write the gain over the default with its sure part, or why there is none."""
    evidence = entry.evidence
    if evidence.confirmed or entry.key.variant in NO_SPEEDS:
        return "-"
    if evidence.baseline.startswith("unusable"):
        return "default\nunusable"
    gain = 1 - evidence.time.median_ms / evidence.baseline_time.median_ms
    return f"{gain:.1%}\nsure {evidence.gain_low:.1%}"


def time_text(entry: AnyEntry, time: Timing) -> str:
    """Write a time of an entry; an emulation has none."""
    return "-" if entry.key.variant in NO_SPEEDS else milliseconds(time.median_ms)


def milliseconds(value: float) -> str:
    """Write a time with three significant digits."""
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"
