"""How a tuning session looks on a terminal: progress while it runs, a table when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.cli import tables
from sage_plugin.families import ATTENTION
from sage_plugin.registry.config_words import config_lines
from sage_plugin.schema import CallShape, RegistryEntry, Trial
from sage_plugin.tune.run.observer import Observer

if TYPE_CHECKING:
    from sage_plugin.tune.configs.outcome import Outcome
    from sage_plugin.tune.configs.plan import TuningPlan
    from sage_plugin.tune.run.study import Study

VERDICT_STYLES = {"tuned": "green", "confirmed": "cyan", "failed": "bold red"}


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
        self._update(verdict)

    def _update(self, state: str, advance: int = 0) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=advance, state=state)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Show per study what the default takes, what the winner takes, and what became of it."""
    table = tables.grid("call", "default", "best", "gain", "config", "valid", "result", padding=1)
    for outcome in outcomes:
        study, entry = outcome.study, outcome.entry
        call = f"{study.kernel}\n{_lines(study.timed.shape)}"
        valid = f"{outcome.trials.get('ok', 0)} of {sum(outcome.trials.values())}"
        result = Text(outcome.verdict, style=VERDICT_STYLES.get(outcome.verdict, ""))
        result.append(f"\n{outcome.written.partition(':')[0]}", style="not bold default")
        if entry is None:
            table.add_row(call, "-", "-", "-", "-", valid, result)
            continue
        evidence = entry.evidence
        table.add_row(
            call,
            milliseconds(evidence.baseline_time.median_ms),
            milliseconds(evidence.time.median_ms),
            gain_text(entry),
            config_lines(entry.config, study.default),
            valid,
            result,
        )
    return table


def outcome_notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Sentences below the table."""
    notes = []
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


def plan_table(plan: TuningPlan) -> Table:
    """Show what `--dry-run` would do, a row per study."""
    table = tables.grid("call", "inputs", "calls", "configs", "default", padding=1)
    for study, calls in zip(plan.studies, plan.calls, strict=True):
        kind = "synthetic" if study.synthetic else "captured"
        table.add_row(
            f"{study.kernel}\n{_lines(study.timed.shape)}",
            f"{len(study.sources)} {kind}",
            str(calls) if calls else "-",
            str(len(study.space)),
            config_lines(study.default),
        )
    return table


def _lines(shape: CallShape) -> str:
    """A call's shape on two lines, for narrow columns."""
    return ATTENTION.describe(shape).replace(" ", "\n", 1)


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
