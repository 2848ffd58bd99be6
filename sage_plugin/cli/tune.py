"""`sage tune`: search launch configs on captured or synthetic inputs and write the winners."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import stderr, stdout
from sage_plugin.cli.tune_inputs import DEFAULT_FOLDER, TuningInputOptions, inputs_of
from sage_plugin.errors import UsageError
from sage_plugin.schema import KERNEL_ALIASES, KERNELS

if TYPE_CHECKING:
    from sage_plugin.tune.configs.outcome import TuneReport
    from sage_plugin.tune.configs.plan import TuningPlan

SOME_FAILED, INTERRUPTED = 4, 130
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}

KERNEL_HELP = (
    f"Kernel, or kernel:variant; repeatable. One of {', '.join((*KERNELS[2:], *KERNEL_ALIASES))} "
    "(default: what the device gets)."
)
Folder = Annotated[Path | None, typer.Argument(help=f"Captures (default {DEFAULT_FOLDER}).")]
FromCaptures = Annotated[bool, typer.Option("--from-captures", help="Tune on recorded inputs.")]
Preset = Annotated[list[str] | None, typer.Option(help="Preset shape, or all; repeatable.")]
SeqLen = Annotated[
    list[str] | None, typer.Option("--seq-len", "-sq", help="Query lengths, as 8192,16384.")
]
SeqK = Annotated[int | None, typer.Option("-sk", help="Key length (default: the query's).")]
Batch = Annotated[int | None, typer.Option("--batch-size", "-b", help="Batch (default 1).")]
HeadsQ = Annotated[int | None, typer.Option("--num-heads", "-hq", help="Query heads (default 5).")]
HeadsK = Annotated[int | None, typer.Option("-hk", help="Key heads (default: the query's).")]
HeadDim = Annotated[int | None, typer.Option("--head-dim", "-d", help="Channels (default 128).")]
DimV = Annotated[int | None, typer.Option("-dv", help="Channels of V (default: the query's).")]
Dtype = Annotated[str | None, typer.Option(help="bf16 (default), fp16 or fp32; not for captures.")]
Causal = Annotated[bool, typer.Option("--causal", "-causal", help="Causal mask.")]
Layout = Annotated[str | None, typer.Option(help="bhsd (default) or bshd.")]
Distribution = Annotated[str, typer.Option("--inputs-distribution", help="Of synthetic inputs.")]
Mask = Annotated[
    str | None,
    typer.Option(help="Of synthetic inputs: none (default), key_bias (padding) or dense (blocks)."),
]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", help=KERNEL_HELP)]
Space = Annotated[
    Path | None, typer.Option("--space", "--config-file", help="JSON object of lists to search.")
]
ConfigDir = Annotated[Path | None, typer.Option(help="Folder of configs to write to.")]
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
Seed = Annotated[int, typer.Option(help="Of the search order and of synthetic inputs.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu (default: a GPU if any).")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be tuned, and stop.")]


def command(
    folder: Folder = None,
    from_captures: FromCaptures = False,
    preset: Preset = None,
    seq_len: SeqLen = None,
    seq_k: SeqK = None,
    batch_size: Batch = None,
    num_heads: HeadsQ = None,
    heads_k: HeadsK = None,
    head_dim: HeadDim = None,
    dim_v: DimV = None,
    dtype: Dtype = None,
    causal: Causal = False,
    layout: Layout = None,
    inputs_distribution: Distribution = "normal",
    mask: Mask = None,
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
    seed: Seed = 0,
    device: Device = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
) -> None:
    """Search launch configs under an accuracy gate, and write the winners for the next patch()."""
    from sage_plugin.tune.configs import space_file
    from sage_plugin.tune.configs.plan import TuningRequest, build
    from sage_plugin.tune.configs.search import SearchLimits

    asked = TuningInputOptions(
        from_captures, folder, tuple(preset or ()), tuple(seq_len or ()), seq_k, batch_size,
        num_heads, heads_k, head_dim, dim_v, causal, layout, dtype, inputs_distribution, seed,
        max_captures_per_key, mask,
    )  # fmt: skip
    request = TuningRequest(
        inputs=inputs_of(asked),
        kernels=tuple(kernel or ()),
        device=device,
        space=None if space is None else space_file.read(space),
        config_dir=config_dir,
        run_name=run_name,
        min_gain=min_gain,
        limits=SearchLimits(max_trials, patience, None if budget is None else seconds(budget)),
        timeout_s=timeout,
        seed=seed,
        fresh=fresh,
    )
    plan = build(request)
    if dry_run:
        _show_plan(plan)
        return
    report = _tune(plan)
    _show(report)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(SOME_FAILED)


def seconds(text: str) -> float:
    """A duration such as `600`, `90s`, `10m` or `2h` in seconds.

    Raises:
        UsageError: it is not one.

    Example:
        >>> seconds("1.5m")
        90.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"--budget {text!r}: a number of seconds, or such as 10m or 2h")
    value = float(match[1]) * SECONDS[match[2]]
    if value == float("inf"):
        raise UsageError("--budget: more seconds than a number holds")
    return value


def _tune(plan: TuningPlan) -> TuneReport:
    from sage_plugin.cli.tune_view import ProgressView
    from sage_plugin.tune.configs.child_runner import ChildRunner
    from sage_plugin.tune.configs.session import tune
    from sage_plugin.tune.run import run_folder

    for note in plan.notes:
        stderr.print(f"left out: {note}", style="yellow", markup=False, highlight=False)
    log = plan.run_folder / run_folder.LOG
    runner = ChildRunner(timeout_s=plan.request.timeout_s, log=log)
    with ProgressView(stderr) as view:
        return tune(plan, runner, view, argv=sys.argv)


def _show_plan(plan: TuningPlan) -> None:
    from sage_plugin.cli.tune_view import plan_table

    stdout.print(plan_table(plan))
    for note in plan.notes:
        _say(f"left out: {note}")
    _say(f"Trials would go to {plan.run_folder}, winners to {plan.registry_path}.")
    _say("Next: the same command without --dry-run")


def _show(report: TuneReport) -> None:
    """The table, where everything went, and what to run next."""
    from sage_plugin.cli.tune_view import outcome_notes, outcome_table

    plan = report.plan
    if report.outcomes:
        stdout.print(outcome_table(report.outcomes))
    for note in outcome_notes(report.outcomes):
        _say(note)
    _say(f"Trials: {plan.run_folder}")
    if any(outcome.entry for outcome in report.outcomes):
        _say(f"Configs: {plan.registry_path}")
    if report.interrupted:
        left = len(plan.studies) - len(report.outcomes)
        _say(f"Stopped with {left} of {len(plan.studies)} calls to go. Next: {_same_command()}")
        return
    _say(f"Next: {_next_command(plan)}")


def _same_command() -> str:
    """The command that goes on from here: the one that was given, but for starting over."""
    return shlex.join(["sage", *(word for word in sys.argv[1:] if word != "--fresh")])


def _next_command(plan: TuningPlan) -> str:
    study = plan.studies[0]
    chosen = plan.request.config_dir
    where = "" if chosen is None else f" --config-dir {shlex.quote(str(chosen))}"
    if study.synthetic:
        return f"sage configs list{where}"
    return f"sage bench {shlex.quote(study.timed.folder)}{where}"


def _say(sentence: str) -> None:
    stdout.print(sentence, markup=False, highlight=False, soft_wrap=True)
