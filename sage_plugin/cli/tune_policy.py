"""`sage tune --policy`: search which kernel each layer runs on at which denoising steps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import stderr, stdout
from sage_plugin.cli.tune_inputs import DEFAULT_FOLDER, Asked
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from sage_plugin.tune.policy.request import Request
    from sage_plugin.tune.policy.search import Found

PANEL = "With --policy"
DEFAULT_OUTPUT = Path("policy.json")
PLOT = "front.png"

Policy = Annotated[
    bool,
    typer.Option(
        "--policy",
        help="Search a policy instead: which kernel for each layer and denoising step.",
        rich_help_panel=PANEL,
    ),
]
MaxError = Annotated[
    float | None,
    typer.Option(
        help="Greatest mean error over all attention calls of the run, such as 0.03.",
        rich_help_panel=PANEL,
    ),
]
MaxMs = Annotated[
    float | None,
    typer.Option(
        help="In its place: longest attention of a run; the least error within it is found.",
        rich_help_panel=PANEL,
    ),
]
MaxLayerError = Annotated[
    float | None,
    typer.Option(help="Greatest error of one call (default 0.15).", rich_help_panel=PANEL),
]
Bands = Annotated[
    int | None,
    typer.Option(help="Bands of denoising steps (default 5).", rich_help_panel=PANEL),
]
MinSeq = Annotated[
    int | None,
    typer.Option(
        help="Calls with fewer queries or keys stay with the host (default 1024).",
        rich_help_panel=PANEL,
    ),
]
Times = Annotated[
    Path | None,
    typer.Option(help="Times of a GPU elsewhere, from sage bench --json.", rich_help_panel=PANEL),
]
Effects = Annotated[
    Path | None,
    typer.Option(
        help="What the clip feels of each layer, from sage bench --effects: weights of errors.",
        rich_help_panel=PANEL,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help=f"Policy file (default {DEFAULT_OUTPUT}).", rich_help_panel=PANEL
    ),
]


@dataclass(frozen=True, slots=True)
class Sought:
    """The options that go with `--policy`, as they were given; `None` where they were not."""

    max_error: float | None = None
    max_ms: float | None = None
    max_layer_error: float | None = None
    bands: int | None = None
    min_seq: int | None = None
    times: Path | None = None
    effects: Path | None = None
    output: Path | None = None

    def refuse_alone(self) -> None:
        """Refuse any of them without `--policy`.

        Raises:
            UsageError: one was given.
        """
        for name in fields(self):
            if getattr(self, name.name) is not None:
                option = f"--{name.name.replace('_', '-')}"
                raise UsageError(f"{option} goes with --policy, the search of a policy")

    def request(
        self,
        asked: Asked,
        *,
        kernels: tuple[str, ...],
        device: str | None,
        config_dir: Path | None,
        run_name: str | None,
        fresh: bool,
    ) -> Request:
        """The search that is asked for.

        Raises:
            UsageError: inputs that are no captures.
        """
        from sage_plugin.tune.policy.request import Request

        if not asked.from_captures:
            raise UsageError(
                "--policy is searched on captures: say --from-captures [FOLDER] (record them with "
                "`sage capture`)"
            )
        refuse(dict.fromkeys(asked.shape_options(), True))
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "output"}
        return Request(
            folder=asked.folder or DEFAULT_FOLDER,
            kernels=kernels,
            device=device,
            config_dir=config_dir,
            run_name=run_name,
            fresh=fresh,
            captures_per_cell=asked.max_per_key,
            **{name: value for name, value in given.items() if value is not None},
        )


def refuse(options: Mapping[str, object]) -> None:
    """Refuse options of the search for launch configs.

    Raises:
        UsageError: one was given.
    """
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"{option} is of the search for launch configs: not with --policy")


def run(request: Request, output: Path | None, *, dry_run: bool) -> None:
    """Search, show, and write the policy unless it is a dry run."""
    from sage_plugin.tune.policy import front_plot

    path = output or DEFAULT_OUTPUT
    if not dry_run:
        _check_output(path)
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
    from sage_plugin.registry import store

    store.write_atomically(path, found.policy.text())
    _say(f"Wrote {path}. Next: sage bench --policy {shlex.quote(str(path))} --end-to-end")


def _check_output(path: Path) -> None:
    """Refuse to replace what is no policy, before anything is measured.

    Raises:
        UsageError: the file is something else, or its folder does not exist.
    """
    from sage_plugin.plugin.policy import is_policy

    if path.exists() and not is_policy(path):
        raise UsageError(f"--output {path}: exists and is no policy; name another file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: the folder {path.absolute().parent} does not exist")


def _searched(request: Request) -> Found:
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


def _rules_table(found: Found) -> Table:
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


def _front_table(found: Found) -> Table:
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


def _summary(found: Found) -> str:
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


def _weighted(found: Found) -> str:
    """The weighted error where there are weights."""
    weighted = found.assignment.error
    same = abs(weighted - found.assignment.plain_error) < 1e-9
    return "" if same else f" (weighted by effects {weighted:.4f})"


def _say(sentence: str, *, to_stderr: bool = False) -> None:
    console = stderr if to_stderr else stdout
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
