"""`sage policy search`: find which kernel each layer runs on at which denoising steps."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli.bench import ConfigDir
from sage_plugin.cli.console import stderr, stdout
from sage_plugin.cli.tune import Device, Fresh, RunName
from sage_plugin.cli.tune_inputs import DEFAULT_FOLDER
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from sage_plugin.tune.policy.request import PolicyRequest
    from sage_plugin.tune.policy.search import PolicySearchResult

PLOT = "front.png"

Folder = Annotated[Path, typer.Argument(help="Captures.")]
MaxError = Annotated[
    float | None,
    typer.Option(help="Greatest mean error over all attention calls of the run, such as 0.03."),
]
MaxMs = Annotated[
    float | None,
    typer.Option(help="In its place: longest attention of a run; the least error within it."),
]
MaxLayerError = Annotated[float, typer.Option(help="Greatest error of one call.")]
Bands = Annotated[int, typer.Option(help="Bands of denoising steps.")]
MinSeq = Annotated[
    int, typer.Option(help="Calls with fewer queries or keys stay with the host's attention.")
]
MaxPerCell = Annotated[
    int,
    typer.Option("--max-captures-per-key", min=1, help="Captures judged for each layer and band."),
]
Times = Annotated[
    Path | None, typer.Option(help="Times of a GPU elsewhere, from sage bench --json.")
]
Effects = Annotated[
    Path | None,
    typer.Option(help="What clips feel, from sage policy sensitivity: weights of errors."),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        help="Kernel to try, or such as fav3_fp8+hadamard=64; repeatable (default: every one).",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the front, and write no policy.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Policy file.")]


def command(
    folder: Folder = DEFAULT_FOLDER,
    max_error: MaxError = None,
    max_ms: MaxMs = None,
    max_layer_error: MaxLayerError = 0.15,
    bands: Bands = 5,
    min_seq: MinSeq = 1024,
    max_captures_per_key: MaxPerCell = 3,
    times: Times = None,
    effects: Effects = None,
    kernel: Kernels = None,
    device: Device = None,
    config_dir: ConfigDir = None,
    run_name: RunName = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    output: Output = Path("policy.json"),
) -> None:
    """Search a policy on captures: which kernel for each layer and denoising step."""
    from sage_plugin.tune.policy import front_plot
    from sage_plugin.tune.policy.request import PolicyRequest

    if not dry_run:
        _check_output(output)
    request = PolicyRequest(
        folder, max_error, max_ms, max_layer_error, tuple(kernel or ()), device, config_dir, bands,
        min_seq, max_captures_per_key, times, effects, run_name=run_name, fresh=fresh,
    )  # fmt: skip
    found = _searched(request)
    plot = found.run_folder / PLOT
    missing = front_plot.save(found, plot)
    stdout.print(_front_table(found) if dry_run else _rules_table(found))
    _say(_summary(found))
    for note in (*found.notes, *([missing] if missing else [])):
        _say(f"note: {note}", to_stderr=True)
    if not missing:
        _say(f"Plot: {plot}")
    _say(f"Measurements: {found.run_folder}")
    if dry_run:
        _say("Next: the same command without --dry-run")
        return
    files.write_atomically(output, found.policy.text())
    _say(f"Wrote {output}. Next: sage policy prove {shlex.quote(str(output))}")


def _check_output(path: Path) -> None:
    """Refuse to replace what is no policy, before anything is measured.

    Raises:
        UsageError: the file is something else, or its folder does not exist.
    """
    from sage_plugin.plugin.policy.rules import is_policy

    if path.exists() and not is_policy(path):
        raise UsageError(f"--output {path}: exists and is no policy; name another file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: the folder {path.absolute().parent} does not exist")


def _searched(request: PolicyRequest) -> PolicySearchResult:
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

    from sage_plugin.tune.policy.search import search

    columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=stderr, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        return search(request, tell)


def _rules_table(found: PolicySearchResult) -> Table:
    from rich.table import Table

    table = Table("rule", "kernel", "layers", "steps", "saved ms a run", "worst error", "captures")
    for number, rule in enumerate(found.policy.rules, start=1):
        fields = "".join(f" {name}={value}" for name, value in rule.launch.items())
        some = rule.layers[0] if len(rule.layers) == 1 else f"{len(rule.layers)} layers"
        table.add_row(
            str(number),
            rule.kernel + fields,
            some,
            rule.steps or "all",
            f"{rule.saved_ms or 0.0:.2f}",
            f"{rule.error or 0.0:.4f}",
            str(len(rule.captures)),
        )
    return table


def _front_table(found: PolicySearchResult) -> Table:
    from collections import Counter

    from rich.table import Table

    table = Table("mean error", "attention ms a run", "saved", "cells by kernel")
    host = found.front[0].ms
    for one in found.front:
        used = Counter(c.pick.label for c in one.chosen)
        table.add_row(
            f"{one.error:.4f}",
            f"{one.ms:.2f}",
            f"{1 - one.ms / host:.1%}" if host else "-",
            ", ".join(f"{label} {count}" for label, count in used.most_common()),
        )
    return table


def _summary(found: PolicySearchResult) -> str:
    """What was chosen beside the host's attention and the fastest kernel, in sentences."""
    prediction = found.policy.prediction
    assert prediction is not None, "a searched policy holds what was foreseen"
    host, *singles, policy = prediction.ways
    lines = [
        f"Attention of a run on {found.device}: {policy.ms:.2f} ms with the policy, "
        f"{host.ms:.2f} with the host's ({host.ms / (policy.ms or host.ms or 1):.2f} times as "
        f"fast), mean error {policy.error:.4f}{_weighted(found)}."
    ]
    if singles:
        lines.append(
            "Each kernel everywhere: "
            + ", ".join(f"{one.way} {one.ms:.2f} ms ({one.error:.4f})" for one in singles)
            + "."
        )
    by_error = found.assignment.slack
    lines.append(
        f"{found.judged} captures in {len(found.grid.captured)} of {len(found.grid.cells)} cells, "
        f"{found.seconds:.0f} s; no choice can be better by more than {by_error:.3g}."
    )
    return "\n".join(lines)


def _weighted(found: PolicySearchResult) -> str:
    """The weighted error where there are weights."""
    weighted = found.assignment.error
    same = abs(weighted - found.assignment.plain_error) < 1e-9
    return "" if same else f" (weighted by effects {weighted:.4f})"


def _say(sentence: str, *, to_stderr: bool = False) -> None:
    console = stderr if to_stderr else stdout
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
