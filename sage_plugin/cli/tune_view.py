"""What a tuning session came to, as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from sage_plugin.bench.rows import EMULATION_NOTE
from sage_plugin.cli import tables
from sage_plugin.families import ATTENTION
from sage_plugin.schema import CallShape, LaunchConfig, RegistryEntry

if TYPE_CHECKING:
    from sage_plugin.tune.configs.outcome import Outcome
    from sage_plugin.tune.configs.plan import TuningPlan
    from sage_plugin.tune.configs.simulate import SimulationResult

VERDICT_STYLES = {"tuned": "green", "confirmed": "cyan", "failed": "bold red"}


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
            config_lines(entry.config),
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


def front_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Write what a loss of exactness would buy: the front of time and error of each call."""
    lines = []
    for outcome in outcomes:
        if len(outcome.front) < 2:
            continue
        study = outcome.study
        lines.append(f"{study.kernel} {ATTENTION.describe(study.timed.shape)}: time and error")
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
        where = f"{study.kernel} {ATTENTION.describe(study.timed.shape)}"
        if outcome.best is None:
            lines.append(f"{where}: nothing valid among {tried} so far")
            continue
        config, ratio = outcome.best
        changes = changes_text(config, study.default)
        lines.append(f"{where}: best of {tried} so far takes {ratio:.3f} of the default: {changes}")
    return lines


def simulation_table(results: Sequence[SimulationResult]) -> Table:
    """Show how the search does on recorded studies, a row each."""
    table = tables.grid(
        "call",
        "configs",
        "gain",
        "loss",
        "near",
        "tried",
        "launches",
        "A/A",
        padding=1,
    )
    for one in results:
        table.add_row(
            f"{one.kernel}\n{one.call}".replace(" ", "\n", 1),
            f"{one.configs}\nnoise {one.noise:.1%}",
            f"{one.gain:.1%}",
            f"{one.regret:.2%}\np95 {one.regret_p95:.2%}",
            f"{one.within:.0%}",
            f"{one.tried:.0f}",
            f"{one.launches:.0f}\n{one.launches / one.exhaustive:.1%}",
            f"{one.false_wins:.1%}",
        )
    return table


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


def changes_text(config: LaunchConfig, default: LaunchConfig) -> str:
    """Write the fields of a launch config that are not those of the default."""
    own, other = config.to_json(), default.to_json()
    changed = [f"{name} {value}" for name, value in own.items() if value != other[name]]
    return ", ".join(changed) or "the default"


def config_text(config: LaunchConfig) -> str:
    """Write a launch config on one line: tile, warps, stages, then what is unusual."""
    return config_lines(config).replace("\n", " ")


def config_lines(config: LaunchConfig) -> str:
    """Write a launch config on one line or two, for narrow columns."""
    text = f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}"
    numbers = {"maxnreg": config.maxnreg, "waves": config.waves_per_eu}
    numbers["nonkdim"] = config.matrix_instr_nonkdim
    parts = ["tma"] if config.loads == "descriptor" else []
    parts += [f"{name}{value}" for name, value in numbers.items() if value]
    return f"{text}\n{' '.join(parts)}" if parts else text


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
