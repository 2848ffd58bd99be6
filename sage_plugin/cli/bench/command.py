"""`sage bench`: time and error of the kernels on captures, presets or an explicit shape."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli.bench.choice import short_enough
from sage_plugin.cli.console import progress, put, say, say_left_out, stderr, stdout
from sage_plugin.cli.linear_options import LinearOptions
from sage_plugin.cli.options import (
    DEFAULT_FOLDER,
    METHOD_NAMES,
    SOME_FAILED,
    ConfigDir,
    Device,
    DrawnInputOptions,
    Kernels,
    Words,
    check_config_dir,
    flattened,
    folder_of,
    method_name,
    named_kernels,
    one_of,
    shown_first,
)
from sage_plugin.cli.paged_options import PagedOptions
from sage_plugin.errors import (
    CaptureError,
    GateError,
    OutputError,
    UnsupportedInputError,
    UsageError,
)
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import ATTENTION

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.compare import BenchPlan
    from sage_plugin.bench.rows import Table
    from sage_plugin.bench.suite import Suite
    from sage_plugin.schema import DeviceFacts

METRICS = ("time", "throughput", "bandwidth", "arithmetic_intensity")

Metric = Annotated[str, typer.Option(help=f"{', '.join(METRICS)} or all.")]
CompareTo = Annotated[
    str | None, typer.Option("--compare-to-ref", metavar="NAME", help="Kernel to compare with.")
]
Stats = Annotated[
    bool, typer.Option("--print-compare-stats", help="Print statistics of outputs and errors.")
]
Gated = Annotated[
    bool, typer.Option("--gate", help="Exit 1 when a kernel fails its accuracy gate.")
]
Csv = Annotated[
    str | None, typer.Option("--csv", metavar="FILE", help="Write CSV there, or to stdout (-).")
]
Markdown = Annotated[
    str | None,
    typer.Option("--markdown", metavar="FILE", help="Write the tables as Markdown, likewise."),
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON there, or to stdout (-).")
]
MaxInputs = Annotated[int | None, typer.Option(min=1, help="Captures to use, spread over layers.")]
Method = Annotated[
    str | None, typer.Option(*METHOD_NAMES, help="events, graph, profiler; wall on a CPU.")
]
Force = Annotated[bool, typer.Option("--force", help="Run on a CPU however long it takes.")]


EXAMPLES = (
    "sage bench captured_inputs --compare-to-ref fav2 --markdown bench.md",
    "sage bench -sq 1024 -hq 2 -d 64 --kernel sage --kernel sdpa",
)


@shown_first("kernel", "compare_to_ref", "max_inputs")
@flattened
def command(
    inputs: DrawnInputOptions,
    linears: LinearOptions,
    paged: PagedOptions,
    words: Words = None,
    kernel: Kernels = None,
    metric: Metric = "all",
    compare_to_ref: CompareTo = None,
    print_compare_stats: Stats = False,
    max_inputs: MaxInputs = None,
    gate: Gated = False,
    csv: Csv = None,
    json: Json = None,
    markdown: Markdown = None,
    method: Method = None,
    config_dir: ConfigDir = None,
    device: Device = None,
    force: Force = False,
) -> None:
    """Replay captures, or synthetic inputs, through the kernels: time, throughput and error."""
    from sage_plugin import device as devices
    from sage_plugin.bench.compare import BenchPlan
    from sage_plugin.families import family
    from sage_plugin.measure.timers import check_method

    method = method_name(method)
    outputs = {"csv": csv, "json": json, "markdown": markdown}
    _check_outputs(outputs)
    check_config_dir(config_dir)
    folder = folder_of(words, inputs)
    metrics = METRICS if metric == "all" else (one_of("--metric", metric, (*METRICS, "all")),)
    suite = _suite(inputs, linears, paged, folder, max_inputs)
    entry = family(linears.op)
    where, facts = devices.chosen(device)
    if method is not None:
        check_method(method, where)
    plan = BenchPlan(
        kernels=named_kernels(kernel or linears.kernels(), facts, entry),
        reference=None if compare_to_ref is None else entry.parse_kernel(compare_to_ref),
        method=method,
        config_dir=None if config_dir is None else str(config_dir),
        seed=inputs.seed,
        differences=print_compare_stats,
    )
    if where.type == "cpu" and not force:
        may_choose = suite.cases[0].record is not None and max_inputs is None
        suite = short_enough(suite, plan, may_choose=may_choose)
    tables, missed = _run(suite, plan, where)
    written = _write(tables, metrics, facts, outputs)
    try:
        _show(tables, metrics, (*suite.skipped, *missed), to_stderr="-" in outputs.values())
    except BrokenPipeError:
        raise
    except OSError as error:
        there = f"; {' and '.join(written)} is complete" if written else ""
        reason = error.strerror or error
        raise OutputError(f"the tables cannot be printed ({reason}){there}") from None
    _say_next(tables, written, folder, linears.op)
    if gate:
        _judge(tables)
    if missed or (kernel and any(table.failed for table in tables)):
        raise typer.Exit(SOME_FAILED)


def _check_outputs(outputs: dict[str, str | None]) -> None:
    from sage_plugin.bench.report import check_writable

    printed = [f"--{kind} -" for kind, name in outputs.items() if name == "-"]
    if len(printed) > 1:
        raise UsageError(f"{' and '.join(printed)} both want stdout: give one of them a file")
    for name in outputs.values():
        if name is not None and name != "-":
            check_writable(Path(name))


def _suite(
    inputs: DrawnInputOptions,
    linears: LinearOptions,
    paged: PagedOptions,
    folder: Path | None,
    max_inputs: int | None,
) -> Suite:
    """What is compared on: drawn inputs if some are spelt out, else captures."""
    from sage_plugin.bench import suite

    if linears.chosen:
        drawn = linears.inputs(inputs) if linears.draws(folder) else []
    elif paged.chosen(linears.op):
        drawn = paged.inputs(inputs, linears.tp_size) if paged.draws(folder) else []
    else:
        drawn = [] if folder else inputs.inputs()
    if drawn:
        if max_inputs is not None:
            raise UsageError("--max-inputs goes with a capture folder")
        return suite.Suite(tuple(drawn))
    inputs.refuse_with_captures()
    if linears.op == PAGED_ATTENTION and linears.tp_size != 1:
        raise UsageError(f"--tp-size {linears.tp_size} does not change captures: leave it out")
    return suite.captured(folder or DEFAULT_FOLDER, max_inputs, linears.op)


def _run(suite: Suite, plan: BenchPlan, where: torch.device) -> tuple[list[Table], list[str]]:
    """All tables, and a sentence for each input that failed."""
    from sage_plugin.bench.compare import run_case

    tables, missed = [], []
    with progress() as report:
        for number, case in enumerate(suite.cases, start=1):
            report(f"{case.name} ({number} of {len(suite.cases)})")
            try:
                tables.append(run_case(case, plan, device=where))
            except (UnsupportedInputError, CaptureError) as error:
                if len(suite.cases) == 1:
                    raise
                missed.append(str(error))
    if not tables:
        raise UnsupportedInputError(f"no input could be run: {missed[0]}")
    return tables, missed


def _show(
    tables: Sequence[Table],
    metrics: Sequence[str],
    left_out: tuple[str, ...],
    *,
    to_stderr: bool,
) -> None:
    from sage_plugin.cli.bench.table import render
    from sage_plugin.cli.bench.verdict import verdict

    console = stderr if to_stderr else stdout
    console.print(render(tables, metrics, width=console.width), soft_wrap=False)
    console.print(verdict(tables), markup=False, soft_wrap=False)
    say_left_out(left_out)


def _write(
    tables: Sequence[Table],
    metrics: Sequence[str],
    facts: DeviceFacts,
    outputs: dict[str, str | None],
) -> list[str]:
    """Write the files before anything is shown; their names."""
    from sage_plugin import device as devices
    from sage_plugin.bench import report
    from sage_plugin.cli.bench.table import as_markdown

    text_of: dict[str, Callable[..., str]] = {
        "csv": report.csv_text,
        "json": report.json_text,
        "markdown": functools.partial(as_markdown, metrics=metrics),
    }
    written = []
    for kind, name in outputs.items():
        if name is None:
            continue
        text = text_of[kind](tables, device=facts, toolchain=devices.toolchain())
        if name == "-":
            put(text)
        else:
            files.write_atomically(Path(name), text)
            written.append(name)
    return written


def _say_next(
    tables: Sequence[Table], written: Sequence[str], folder: Path | None, op: str
) -> None:
    """Say where the files are, and what to do with what was found."""
    place = shlex.quote(str(folder or DEFAULT_FOLDER)) + ("" if op == ATTENTION else f" --op {op}")
    if written:
        say(f"Wrote {' and '.join(written)}.", to_stderr=True)
    rows = [row for table in tables for row in table.rows]
    if rows[0].source != "capture":
        say(
            "Next: sage capture, to compare the kernels on your model's own tensors", to_stderr=True
        )
    elif not any(row.config_source for row in rows):
        told = (
            f"sage bench {place}, without --kernel, to compare all"
            if op == ATTENTION
            else "the same on the GPU that your model runs on"
        )
        say(f"Next: {told}", to_stderr=True)
    elif not any(row.config_source in ("exact", "near", "env") for row in rows):
        say(f"Next: sage tune {place}, since all configs are defaults", to_stderr=True)
    else:
        say("Next: your own pipeline; sage_plugin.patch(pipe) uses these configs", to_stderr=True)


def _judge(tables: Sequence[Table]) -> None:
    """Raise if a kernel failed its gate, or could not run."""
    broken = [
        f"{row.label} on {table.input}: {reason}"
        for table in tables
        for row in table.rows
        for reason in row.gate
    ]
    broken += [f"{table.input}: {reason}" for table in tables for reason in table.failed]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise GateError(f"accuracy gate: {broken[0]}{more}")
