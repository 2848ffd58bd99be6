"""`sage tune`: search launch configs on captured or synthetic inputs and write the winners."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import say, say_left_out, stderr, stdout
from sage_plugin.cli.model_options import ModelOptions
from sage_plugin.cli.options import (
    DEFAULT_FOLDER,
    SOME_FAILED,
    ConfigDir,
    Device,
    DrawnInputOptions,
    Kernels,
    Words,
    flattened,
    folder_of,
    shown_first,
)
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.tune.configs.inputs import TuningInputs
    from sage_plugin.tune.configs.outcome import TuneReport
    from sage_plugin.tune.configs.plan import TuningPlan

INTERRUPTED = 130
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}

FromCaptures = Annotated[
    bool, typer.Option("--from-captures", help="Tune on recorded inputs, as without a shape.")
]
Space = Annotated[
    Path | None, typer.Option("--space", "--config-file", help="JSON object of lists to search.")
]
RunName = Annotated[str | None, typer.Option(help="Folder in ./tuning_runs (default: by inputs).")]
MaxPerKey = Annotated[
    int, typer.Option("--max-captures-per-key", min=1, help="Captures judged for each call key.")
]
MinGain = Annotated[float, typer.Option(help="Smallest sure gain worth an entry; 0.01 is 1 %.")]
Timeout = Annotated[float, typer.Option(help="Seconds that one trial may take.")]
Budget = Annotated[str | None, typer.Option(help="Time for all of it: 600, 10m or 2h.")]
MaxTrials = Annotated[int | None, typer.Option(help="Configs to try for each call key.")]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience",
        "--max-configs-without-improvement",
        help="Stop after so many valid configs without a better one.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")]
Update = Annotated[
    bool,
    typer.Option("--update-registry/--no-update", help="Write winners, or only measure them."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be tuned, and stop.")]


EXAMPLES = (
    "sage tune captured_inputs --budget 10m",
    "sage tune -sq 1024 -hq 2 -d 64 --kernel sage --max-trials 2",
)


@shown_first("kernel", "budget", "dry_run")
@flattened
def command(
    inputs: DrawnInputOptions,
    model: ModelOptions,
    words: Words = None,
    from_captures: FromCaptures = False,
    kernel: Kernels = None,
    space: Space = None,
    config_dir: ConfigDir = None,
    run_name: RunName = None,
    max_captures_per_key: MaxPerKey = 3,
    min_gain: MinGain = 0.01,
    timeout: Timeout = 300.0,
    budget: Budget = None,
    max_trials: MaxTrials = None,
    patience: Patience = None,
    device: Device = None,
    fresh: Fresh = False,
    update: Update = True,
    dry_run: DryRun = False,
) -> None:
    """Search launch configs under an accuracy gate, and write the winners for the next patch()."""
    from sage_plugin.tune.configs import space_file
    from sage_plugin.tune.configs.plan import TuningRequest, build
    from sage_plugin.tune.configs.search import SearchLimits

    request = TuningRequest(
        inputs=_inputs(
            inputs, model, folder_of(words, inputs), from_captures, max_captures_per_key
        ),
        kernels=tuple(kernel or ()),
        device=device,
        space=None if space is None else space_file.read(space),
        config_dir=config_dir,
        run_name=run_name,
        min_gain=min_gain,
        limits=SearchLimits(max_trials, patience, None if budget is None else seconds(budget)),
        timeout_s=timeout,
        seed=inputs.seed,
        fresh=fresh,
        update=update,
    )
    plan = build(request)
    if dry_run:
        show_plan(plan)
        return
    report = run_plan(plan)
    show_report(report)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(SOME_FAILED)


def _inputs(
    inputs: DrawnInputOptions,
    model: ModelOptions,
    folder: Path | None,
    from_captures: bool,
    max_per_key: int,
) -> TuningInputs:
    """What is tuned on: drawn inputs if some are spelt out, else captures."""
    from sage_plugin.tune.configs import inputs as tuning_inputs

    if not from_captures and folder is None and (drawn := model.inputs(inputs)):
        return tuning_inputs.from_drawn(drawn)
    inputs.refuse_with_captures()
    model.refuse_with_captures()
    if not from_captures and folder is None and not DEFAULT_FOLDER.exists():
        raise UsageError(
            "nothing to tune on: give a folder of captures (sage capture records one), "
            "--preset NAME, or --seq-len N"
        )
    return tuning_inputs.from_captures(folder or DEFAULT_FOLDER, max_per_key=max_per_key)


def seconds(text: str) -> float:
    """Read a duration such as `600`, `90s`, `10m` or `2h` in seconds.

    Raises:
        UsageError: it is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"--budget {text!r}: a number of seconds, or such as 10m or 2h")
    value = float(match[1]) * SECONDS[match[2]]
    if value == float("inf"):
        raise UsageError("--budget: more seconds than a number holds")
    return value


def run_plan(plan: TuningPlan) -> TuneReport:
    """Tune as a plan says, with progress on stderr."""
    from sage_plugin.cli.tune_view import ProgressView
    from sage_plugin.tune.configs.session import tune
    from sage_plugin.tune.configs.subprocess_runner import SubprocessRunner
    from sage_plugin.tune.run import run_folder

    say_left_out(plan.notes)
    log = plan.run_folder / run_folder.LOG
    runner = SubprocessRunner(timeout_s=plan.request.timeout_s, log=log)
    with ProgressView(stderr) as view:
        return tune(plan, runner, view, argv=sys.argv)


def show_plan(plan: TuningPlan) -> None:
    """Show what would be tuned."""
    from sage_plugin.cli.tune_view import plan_table

    stdout.print(plan_table(plan, width=stdout.width))
    say(*(f"left out: {note}" for note in plan.notes))
    say(f"Trials would go to {plan.run_folder}, winners to {plan.registry_path}.")
    say("Next: the same command without --dry-run")


def show_report(report: TuneReport) -> None:
    """Show the table, where everything went, and what to run next."""
    from sage_plugin.cli.tune_view import outcome_notes, outcome_table

    plan = report.plan
    if report.outcomes:
        stdout.print(outcome_table(report.outcomes, width=stdout.width))
    say(*outcome_notes(report.outcomes, min_gain=plan.request.min_gain))
    say(f"Trials: {plan.run_folder}")
    if any(outcome.entry for outcome in report.outcomes) and plan.request.update:
        say(f"Configs: {plan.registry_path}")
    if report.interrupted:
        left = len(plan.studies) - len(report.outcomes)
        say(f"Stopped with {left} of {len(plan.studies)} calls to go. Next: {_same_command()}")
        return
    say(f"Next: {_next_command(plan)}")


def _same_command() -> str:
    """The command that goes on from here: the one that was given, but for starting over."""
    return shlex.join(["sage", *(word for word in sys.argv[1:] if word != "--fresh")])


def _next_command(plan: TuningPlan) -> str:
    study = plan.studies[0]
    if not plan.request.update:
        return f"sage configs apply {shlex.quote(plan.run_folder.name)}, which writes the winners"
    chosen = plan.request.config_dir
    where = "" if chosen is None else f" --config-dir {shlex.quote(str(chosen))}"
    if study.synthetic:
        return f"sage configs list{where}, or your pipeline: sage_plugin.patch(pipe) uses them"
    return f"sage bench {shlex.quote(study.timed.folder)}{where}"
