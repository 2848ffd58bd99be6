"""`sage tune`: search launch configs on captured or synthetic inputs and write the winners."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import say, say_left_out, stderr, stdout
from sage_plugin.cli.linear_options import LinearCallOptions
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
from sage_plugin.cli.paged_options import PagedOptions
from sage_plugin.cli.tuning.options import PlaceOptions, SearchOptions
from sage_plugin.errors import UsageError
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import ATTENTION

if TYPE_CHECKING:
    from sage_plugin.tune.configs.inputs import TuningInputs
    from sage_plugin.tune.configs.outcome import TuneReport
    from sage_plugin.tune.configs.plan import TuningPlan

INTERRUPTED = 130

FromCaptures = Annotated[
    bool, typer.Option("--from-captures", help="Tune on recorded inputs, as without a shape.")
]
RunName = Annotated[str | None, typer.Option(help="Folder in ./tuning_runs (default: by inputs).")]
MaxPerKey = Annotated[
    int, typer.Option("--max-captures-per-key", min=1, help="Captures judged for each call key.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")]
Update = Annotated[
    bool,
    typer.Option("--update-registry/--no-update", help="Write winners, or only measure them."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be tuned, and stop.")]
Simulate = Annotated[
    list[Path] | None,
    typer.Option(metavar="RUN", help="Search a recorded run folder again, without a device."),
]


EXAMPLES = (
    "sage tune captured_inputs --budget 10m",
    "sage tune -sq 1024 -hq 2 -d 64 --kernel sage --max-trials 2",
)


@shown_first("kernel", "budget", "dry_run")
@flattened
def command(
    inputs: DrawnInputOptions,
    model: ModelOptions,
    linears: LinearCallOptions,
    paged: PagedOptions,
    search: SearchOptions,
    place: PlaceOptions,
    words: Words = None,
    from_captures: FromCaptures = False,
    kernel: Kernels = None,
    config_dir: ConfigDir = None,
    run_name: RunName = None,
    max_captures_per_key: MaxPerKey = 3,
    device: Device = None,
    fresh: Fresh = False,
    update: Update = True,
    dry_run: DryRun = False,
    simulate: Simulate = None,
) -> None:
    """Search launch configs under an accuracy gate, and write the winners for the next patch()."""
    from sage_plugin.families import family
    from sage_plugin.tune.configs.plan import TuningRequest, build

    if simulate:
        _simulate(simulate, search)
        return
    request = TuningRequest(
        inputs=_inputs(
            inputs,
            model,
            linears,
            paged,
            folder_of(words, inputs),
            from_captures,
            max_captures_per_key,
        ),
        kernels=tuple(kernel or linears.kernels()),
        device=device,
        gpus=place.chosen_gpus(),
        method=search.timing_method(),
        shard=place.part(),
        space=search.space_file(linears.op),
        config_dir=config_dir,
        run_name=run_name,
        min_gain=search.min_gain,
        limits=search.limits(),
        error_limit=search.error_limit(),
        timeout_s=search.timeout,
        seed=inputs.seed,
        fresh=fresh,
        update=update,
        family=family(linears.op),
    )
    follow(build(request), place, dry_run=dry_run)


def _simulate(runs: Sequence[Path], search: SearchOptions) -> None:
    """Show how the search does on recorded runs."""
    from sage_plugin.cli.console import counted
    from sage_plugin.cli.tune_view import simulation_table
    from sage_plugin.tune.configs import simulate

    recorded = [study for run in runs for study in simulate.read(run)]
    request = simulate.request_of(limits=search.limits(), error_limit=search.error_limit())
    found = []
    with counted("search recorded studies", len(recorded)) as advance:
        for study in recorded:
            found.append(simulate.simulate(study, request))
            advance()
    stdout.print(simulation_table(found, width=stdout.width))
    say(
        "Times are drawn from recorded medians and the noise of their intervals; gains of any size "
        "count.",
        "near: share of searches within 0.5 % of the best. launches: timed, and of those that time "
        "each config as often as finalists. A/A: share of winners where all configs are alike.",
    )


def _inputs(
    inputs: DrawnInputOptions,
    model: ModelOptions,
    linears: LinearCallOptions,
    paged: PagedOptions,
    folder: Path | None,
    from_captures: bool,
    max_per_key: int,
) -> TuningInputs:
    """What is tuned on: drawn inputs if some are spelt out, else captures."""
    from sage_plugin.families import family
    from sage_plugin.tune.configs import inputs as tuning_inputs

    recorded = DEFAULT_FOLDER if from_captures and folder is None else folder
    if not linears.chosen and paged.chosen(linears.op):
        model.refuse(linears.op)
        if paged.draws(recorded):
            return tuning_inputs.from_drawn(paged.inputs(inputs, model.tp_size))
    elif linears.chosen:
        whole = model.linears(linears)
        if whole.draws(recorded):
            return tuning_inputs.from_drawn(whole.inputs(inputs))
    elif recorded is None and (drawn := model.inputs(inputs)):
        return tuning_inputs.from_drawn(drawn)
    inputs.refuse_with_captures()
    if not linears.chosen:
        model.refuse_with_captures()
    if not from_captures and folder is None and not DEFAULT_FOLDER.exists():
        raise UsageError(
            "nothing to tune on: give a folder of captures (sage capture records one), "
            "--preset NAME, or --seq-len N"
        )
    if folder is not None and _is_model(folder):
        raise UsageError(f"{folder} is a model, not captures: --model {folder} tunes its calls")
    return tuning_inputs.from_captures(
        folder or DEFAULT_FOLDER, family=family(linears.op), max_per_key=max_per_key
    )


def _is_model(path: Path) -> bool:
    """Whether a path holds the configuration of a model."""
    inside = [path / name for name in ("config.json", "model_index.json")]
    return any(file.is_file() for file in (path, *inside) if file.suffix == ".json")


def follow(plan: TuningPlan, place: PlaceOptions, *, dry_run: bool) -> None:
    """Tune as a plan says and show what came of it, or show the plan alone."""
    if dry_run:
        _show_plan(plan)
        return
    report = _run_plan(plan, place)
    _show_report(report)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(SOME_FAILED)


def _run_plan(plan: TuningPlan, place: PlaceOptions) -> TuneReport:
    """Tune with progress on stderr."""
    from sage_plugin.cli.tuning.progress import ProgressView
    from sage_plugin.tune.configs.compile_pool import default_workers
    from sage_plugin.tune.configs.forecast import forecast
    from sage_plugin.tune.configs.session import tune

    say_left_out(plan.notes)
    first, *more = place.lanes(plan)
    expected = forecast(plan, num_workers=place.num_workers or default_workers())
    say(f"Tune: {expected.text()}. Ctrl-C keeps what is known.", to_stderr=True)
    with ProgressView(stderr) as view:
        return tune(plan, first, view, argv=sys.argv, more_lanes=more)


def _show_plan(plan: TuningPlan) -> None:
    """Show what would be tuned."""
    from sage_plugin.cli.tune_view import plan_table

    stdout.print(plan_table(plan, width=stdout.width))
    say(*(f"left out: {note}" for note in plan.notes))
    say(f"Trials would go to {plan.run_folder}, winners to {plan.registry_path}.")
    say("Next: the same command without --dry-run")


def _show_report(report: TuneReport) -> None:
    """Show the table, where everything went, and what to run next."""
    from sage_plugin.cli.tune_view import best_lines, front_lines, outcome_notes, outcome_table
    from sage_plugin.tune.configs.outcome import save_fronts

    plan = report.plan
    if report.outcomes:
        stdout.print(outcome_table(report.outcomes, width=stdout.width))
    say(*outcome_notes(report.outcomes, min_gain=plan.request.min_gain))
    say(*front_lines(report.outcomes))
    if missing := save_fronts(report):
        say(missing)
    say(f"Trials: {plan.run_folder}")
    if any(outcome.entry for outcome in report.outcomes) and plan.request.update:
        say(f"Configs: {plan.registry_path}")
    if report.interrupted:
        say(*best_lines(report.unfinished))
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
        users = {ATTENTION: "patch(pipe)", PAGED_ATTENTION: "continuous_batching(model)"}
        user = users.get(study.key.family, "patch(pipe, linears='auto')")
        return f"sage configs list{where}, or your pipeline: sage_plugin.{user} uses them"
    op = "" if study.key.family == ATTENTION else f" --op {study.key.family}"
    return f"sage bench {shlex.quote(study.timed.folder)}{op}{where}"
