"""How a tuning session looks on a terminal: progress while it runs, a table when it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.cli import tables
from sage_plugin.families import ATTENTION
from sage_plugin.families.attention.labels import lines
from sage_plugin.registry.config_words import config_lines
from sage_plugin.schema import RegistryEntry, Trial
from sage_plugin.tune.run.observer import Observer

if TYPE_CHECKING:
    from sage_plugin.tune.configs.outcome import Outcome
    from sage_plugin.tune.configs.plan import TuningPlan
    from sage_plugin.tune.run.study import Study

VERDICT_STYLES = {"tuned": "green", "confirmed": "cyan", "failed": "bold red"}
RESULT_WORDS = {"confirmed": "default kept"}
WRITTEN_WORDS = {"added": "entry written", "replaced": "entry replaced", "kept": "entry kept"}
"""How verdicts and what the registry did are said."""


class ProgressView(Observer):
    """An observer that draws one line per study."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self._best = float("inf")
        self._failed = 0

    def __enter__(self) -> ProgressView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def study_started(self, study: Study, *, done: int, total: int) -> None:
        """Add a line, that starts where an earlier run stopped."""
        self._best, self._failed = float("inf"), 0
        state = f"{done} from an earlier run" if done else ""
        name = f"{study.key.kernel} {ATTENTION.describe(study.timed.shape)}"
        self._task = self._progress.add_task(name, total=total, completed=done, state=state)

    def trial_finished(self, study: Study, trial: Trial) -> None:
        """Advance by one, and show the best time."""
        self._failed += trial.status != "ok"
        if trial.time is not None:
            self._best = min(self._best, trial.time.median_ms)
        best = "" if self._best == float("inf") else f"best {milliseconds(self._best)}"
        failed = f"{self._failed} failed" if self._failed else ""
        self._update(", ".join(part for part in (best, failed) if part), advance=1)

    def race_started(self, study: Study, finalists: int) -> None:
        """Show the race in the progress line."""
        self._update(f"racing {finalists} finalists")

    def study_finished(self, study: Study, verdict: str) -> None:
        """End the line with the verdict."""
        self._update(RESULT_WORDS.get(verdict, verdict))

    def _update(self, state: str, advance: int = 0) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=advance, state=state)


def outcome_table(outcomes: Sequence[Outcome], *, width: int) -> Group:
    """Show per study what the default takes, what the winner takes, and what became of it."""

    def of_entry(cell: Callable[[RegistryEntry], str]) -> Callable[[Outcome], str]:
        return lambda outcome: "-" if outcome.entry is None else cell(outcome.entry)

    times: list[tables.Column[Outcome]] = [
        ("default", of_entry(lambda e: milliseconds(e.evidence.baseline_time.median_ms))),
        ("best", of_entry(lambda e: milliseconds(e.evidence.time.median_ms))),
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
        where = f"{outcome.study.kernel} {ATTENTION.describe(outcome.study.timed.shape)}"
        notes += [f"{where}: {note}" for note in outcome.notes]
        if outcome.written.startswith("kept") and not outcome.written.endswith("already there"):
            notes.append(f"{where}: {outcome.written}")
        emulated = outcome.study.key.variant == "emulation"
        stamp = outcome.entry.evidence.stamp if outcome.entry is not None else ""
        if stamp not in ("", "clean") and not emulated:
            notes.append(f"{where}: times are {stamp}")
    if any(outcome.study.key.variant == "emulation" for outcome in outcomes):
        notes.append(EMULATION_NOTE)
    return notes


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
    return f"{study.kernel}\n{lines(study.timed.shape)}"


def gain_text(entry: RegistryEntry) -> str:
    """Write the gain over the default with its sure part, or why there is none."""
    evidence = entry.evidence
    if evidence.confirmed:
        return "-"
    if evidence.baseline.startswith("unusable"):
        return "default\nunusable"
    gain = 1 - evidence.time.median_ms / evidence.baseline_time.median_ms
    return f"{gain:.1%}\nsure {evidence.gain_low:.1%}"


def milliseconds(value: float) -> str:
    """Write a time with three significant digits."""
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"
