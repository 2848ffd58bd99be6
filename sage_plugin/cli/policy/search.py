"""`sage policy search`: find which kernel each layer runs on at which denoising steps."""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli.console import progress, say, stdout
from sage_plugin.cli.options import (
    DEFAULT_FOLDER,
    ConfigDir,
    Device,
    StepRanges,
    flattened,
    shown_first,
)
from sage_plugin.cli.tables import Column, fitted
from sage_plugin.cli.tune import Fresh, RunName
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Group

    from sage_plugin.plugin.policy.rules import Rule
    from sage_plugin.tune.policy.choice import Assignment
    from sage_plugin.tune.policy.search import PolicySearchResult

PLOT = "front.png"

Folder = Annotated[Path, typer.Argument(help="Captures.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Policy file.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a policy that no search wrote.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the front, and write no policy.")]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The options that are fields of a `PolicyRequest`."""

    max_error: Annotated[
        float | None,
        typer.Option(help="Greatest mean error over all calls of the run, such as 0.03."),
    ] = None
    max_ms: Annotated[
        float | None,
        typer.Option(help="In its place: longest calls of a run; the least error within it."),
    ] = None
    max_layer_error: Annotated[float, typer.Option(help="Greatest error of one call.")] = 0.15
    step_ranges: StepRanges = 5
    min_seq: Annotated[
        int, typer.Option(help="Calls with fewer queries or keys fall back, and are in no rule.")
    ] = 1024
    captures_per_cell: Annotated[
        int,
        typer.Option(
            "--max-captures-per-key", min=1, help="Captures judged for each layer and step range."
        ),
    ] = 3
    times: Annotated[
        list[Path] | None,
        typer.Option(help="Times of a GPU elsewhere, from sage bench --json; repeatable."),
    ] = None
    sensitivity: Annotated[
        Path | None, typer.Option(help="Weights of errors, from sage policy sensitivity.")
    ] = None
    smoothing: Annotated[
        Path | None,
        typer.Option(help="Factors of sage policy smoothing, to try linears with too."),
    ] = None
    kernels: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel",
            help="Kernel of attention or linears to try, or such as fav3_fp8+hadamard=64; "
            "repeatable (default: every one).",
        ),
    ] = None
    device: Device = None
    config_dir: ConfigDir = None
    run_name: RunName = None
    fresh: Fresh = False


EXAMPLES = (
    "sage policy search --max-error 0.03",
    "sage policy search captured_inputs --max-error 0.03 --times bench.json -o mine.json",
)


@shown_first("max_error", "max_ms", "output", "dry_run")
@flattened
def command(
    search: PolicyOptions,
    folder: Folder = DEFAULT_FOLDER,
    dry_run: DryRun = False,
    output: Output = Path("policy.json"),
    overwrite: Overwrite = False,
) -> None:
    """Search a policy on captures: which kernel for each layer and denoising step."""
    from sage_plugin.tune.policy import front_plot
    from sage_plugin.tune.policy.request import PolicyRequest
    from sage_plugin.tune.policy.search import search as run_search

    if not dry_run:
        _check_output(output, overwrite=overwrite)
    fields = {field.name: getattr(search, field.name) for field in dataclasses.fields(search)}
    fields |= {"kernels": tuple(search.kernels or ()), "times": tuple(search.times or ())}
    with progress() as report:
        found = run_search(
            PolicyRequest(folder, **fields),
            lambda what, done, total: report(f"{what} ({done} of {total})"),
        )
    plot = found.run_folder / PLOT
    missing = front_plot.save(found, plot, max_error=search.max_error, max_ms=search.max_ms)
    stdout.print(_front_table(found) if dry_run else _rules_table(found))
    say(_summary(found))
    notes = (*found.notes, *([missing] if missing else []))
    say(*(f"note: {note}" for note in notes), to_stderr=True)
    if not missing:
        say(f"Plot: {plot}")
    say(f"Measurements: {found.run_folder}")
    if dry_run:
        say("Next: the same command without --dry-run")
        return
    policy = found.policy
    if policy.smoothing:
        beside = os.path.relpath(policy.smoothing, output.absolute().parent)
        policy = dataclasses.replace(policy, smoothing=beside)
    files.write_atomically(output, policy.text())
    say(f"Wrote {output}. Next: sage policy prove {shlex.quote(str(output))}")


def _check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace what no search wrote, before anything is measured.

    Raises:
        UsageError: the file is something else, or its folder does not exist.
    """
    from sage_plugin.plugin.policy import rules

    if path.exists() and not rules.is_policy(path):
        raise UsageError(f"--output {path}: exists and is not a policy; name another file")
    if path.exists() and not overwrite and not rules.was_searched(path):
        raise UsageError(
            f"--output {path}: is a policy that no search wrote; replace it with --overwrite, or "
            "name another file"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: the folder {path.absolute().parent} does not exist")


def _rules_table(found: PolicySearchResult) -> Group:
    from rich.console import Group

    def kernel(rule: Rule) -> str:
        words = rule.label.split("+")
        return "\n".join([*words, *(f"{name}={v}" for name, v in rule.launch.items())])

    def layers(rule: Rule) -> str:
        return rule.layers[0] if len(rule.layers) == 1 else f"{len(rule.layers)} layers"

    rules = found.policy.rules
    of: list[Column[Rule]] = [
        ("kernel", kernel),
        ("op", lambda rule: rule.op),
        ("layers", layers),
        ("steps", lambda rule: rule.steps or "all"),
    ]
    numbers: list[Column[Rule]] = [
        ("saved ms per run", lambda rule: f"{rule.saved_ms or 0.0:.2f}"),
        ("worst error", lambda rule: f"{rule.error or 0.0:.4f}"),
        ("captures", lambda rule: str(len(rule.captures))),
    ]
    label: Column[Rule] = ("rule", lambda rule: str(1 + rules.index(rule)))
    return Group(*fitted(rules, label, [of, numbers], stdout.width, padding=1))


def _front_table(found: PolicySearchResult) -> Group:
    from collections import Counter

    from rich.console import Group

    host = found.front[0].ms

    def used(one: Assignment) -> str:
        counts = Counter(pick.label for pick in one.picks).most_common()
        return "\n".join(f"{label} {count}" for label, count in counts)

    columns: list[Column[Assignment]] = [
        ("ms per run", lambda one: f"{one.ms:.2f}"),
        ("saved", lambda one: f"{1 - one.ms / host:.1%}" if host else "-"),
        ("cells by kernel", used),
    ]
    label: Column[Assignment] = ("mean error", lambda one: f"{one.error:.4f}")
    return Group(*fitted(found.front, label, [columns], stdout.width, padding=1))


def _summary(found: PolicySearchResult) -> str:
    """What was chosen beside the host's own and the fastest kernel, in sentences."""
    host, *singles, policy = found.prediction.runs
    words = found.problem.words.capitalize()
    captured = sum(len(grid.captured) for grid in found.grids)
    cells = sum(len(grid.cells) for grid in found.grids)
    error, plain = found.assignment.error, found.assignment.plain_error
    weighted = "" if abs(error - plain) < 1e-9 else f" (weighted by sensitivity {error:.4f})"
    lines = [
        f"{words} of a run on {found.device}: {policy.ms:.2f} ms with the policy, "
        f"{host.ms:.2f} with the host's ({host.ms / (policy.ms or host.ms or 1):.2f} times as "
        f"fast), mean error {policy.error:.4f}{weighted}."
    ]
    if singles:
        lines.append(
            "Each kernel everywhere: "
            + ", ".join(f"{one.name} {one.ms:.2f} ms ({one.error:.4f})" for one in singles)
            + "."
        )
    lines.append(
        f"{found.judged} captures in {captured} of {cells} cells, "
        f"{found.seconds:.0f} s; no choice can be better by more than {found.assignment.slack:.3g}."
    )
    return "\n".join(lines)
