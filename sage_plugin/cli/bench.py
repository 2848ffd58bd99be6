"""`sage bench`: time and error of the kernels on captures, presets or an explicit shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli.bench_inputs import DEFAULT_FOLDER, BenchInputOptions, suite_of
from sage_plugin.cli.console import stderr, stdout
from sage_plugin.errors import CaptureError, GateError, UnsupportedInputError, UsageError
from sage_plugin.schema import KERNEL_ALIASES, KERNELS

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.compare import BenchPlan
    from sage_plugin.bench.rows import Table
    from sage_plugin.bench.suite import Suite
    from sage_plugin.schema import DeviceFacts

METRICS = ("time", "throughput", "bandwidth", "arithmetic_intensity")
SOME_FAILED = 4

KERNEL_HELP = (
    f"Kernel, or kernel:variant; repeatable. One of {', '.join((*KERNELS, *KERNEL_ALIASES))}."
)
Folder = Annotated[Path | None, typer.Argument(help="Capture folder (default ./captured_inputs).")]
Preset = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Preset shape, or all; repeatable.")
]
Size = Annotated[int | None, typer.Option("-b", help="Batch of an explicit shape.")]
HeadsQ = Annotated[int | None, typer.Option("-hq", help="Query heads.")]
HeadsK = Annotated[int | None, typer.Option("-hk", help="Key heads (default -hq).")]
SeqQ = Annotated[int | None, typer.Option("-sq", help="Query length.")]
SeqK = Annotated[int | None, typer.Option("-sk", help="Key length (default -sq).")]
HeadDim = Annotated[int | None, typer.Option("-d", help="Channels of a head.")]
DimV = Annotated[int | None, typer.Option("-dv", help="Channels of V; has to be -d.")]
Dtype = Annotated[str | None, typer.Option(help="fp16, bf16 (default) or fp32; not for captures.")]
Causal = Annotated[bool, typer.Option("--causal", help="Causal mask, for an explicit shape.")]
Layout = Annotated[str | None, typer.Option(help="bhsd or bshd, for an explicit shape.")]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", metavar="NAME", help=KERNEL_HELP)]
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
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON there, or to stdout (-).")
]
MaxInputs = Annotated[int | None, typer.Option(min=1, help="Captures to use, spread over layers.")]
Distribution = Annotated[
    str | None,
    typer.Option("--inputs-distribution", help="normal (default), biased, drift or outlier."),
]
Mask = Annotated[
    str | None,
    typer.Option(help="Of synthetic inputs: none (default), key_bias (padding) or dense (blocks)."),
]
Seed = Annotated[int, typer.Option(help="Of synthetic inputs and of the order of timing.")]
Method = Annotated[str | None, typer.Option(help="events, graph, profiler; wall on a CPU.")]
ConfigDir = Annotated[Path | None, typer.Option(help="Folder of configs to search first.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu (default: a GPU if any).")]
Force = Annotated[bool, typer.Option("--force", help="Run on a CPU however long it takes.")]


def command(
    folder: Folder = None,
    preset: Preset = None,
    batch: Size = None,
    heads_q: HeadsQ = None,
    heads_k: HeadsK = None,
    seq_q: SeqQ = None,
    seq_k: SeqK = None,
    head_dim: HeadDim = None,
    dim_v: DimV = None,
    dtype: Dtype = None,
    causal: Causal = False,
    layout: Layout = None,
    kernel: Kernels = None,
    metric: Metric = "all",
    compare_to_ref: CompareTo = None,
    print_compare_stats: Stats = False,
    gate: Gated = False,
    csv: Csv = None,
    json: Json = None,
    max_inputs: MaxInputs = None,
    inputs_distribution: Distribution = None,
    mask: Mask = None,
    seed: Seed = 0,
    method: Method = None,
    config_dir: ConfigDir = None,
    device: Device = None,
    force: Force = False,
) -> None:
    """Replay captures, or synthetic inputs, through the kernels: time, throughput and error."""
    from sage_plugin.bench.compare import BenchPlan
    from sage_plugin.families import ATTENTION

    _check_outputs(csv, json)
    metrics = _metrics(metric)
    asked = BenchInputOptions(
        folder, tuple(preset or ()), batch, heads_q, heads_k, seq_q, seq_k, head_dim, dim_v, dtype,
        causal, layout, max_inputs, inputs_distribution, seed, mask,
    )  # fmt: skip
    suite = suite_of(asked)
    where, facts = device_of(device, method)
    plan = BenchPlan(
        kernels=named_kernels(kernel or (), facts),
        reference=None if compare_to_ref is None else ATTENTION.parse_kernel(compare_to_ref),
        method=method,
        config_dir=None if config_dir is None else str(config_dir),
        seed=seed,
        differences=print_compare_stats,
    )
    if where.type == "cpu" and not force:
        _refuse_long(suite, plan)
    tables, missed = _run(suite, plan, where)
    _show(tables, metrics, (*suite.skipped, *missed), to_stderr="-" in (csv, json))
    _write(tables, facts, csv, json, folder)
    if gate:
        _judge(tables)
    if missed or (kernel and any(table.failed for table in tables)):
        raise typer.Exit(SOME_FAILED)


def _check_outputs(csv: str | None, json: str | None) -> None:
    from sage_plugin.bench.report import check_writable

    if csv == json == "-":
        raise UsageError("--csv - and --json - both want stdout: give one of them a file")
    for name in (csv, json):
        if name is not None and name != "-":
            check_writable(Path(name))


def _metrics(metric: str) -> tuple[str, ...]:
    if metric != "all" and metric not in METRICS:
        raise UsageError(f"--metric {metric!r}: allowed are all, {', '.join(METRICS)}")
    return METRICS if metric == "all" else (metric,)


def device_of(name: str | None, method: str | None = None) -> tuple[torch.device, DeviceFacts]:
    """The device, checked together with the timing method."""
    import torch

    from sage_plugin import device as devices
    from sage_plugin.measure.timers import check_method

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name!r}: use cuda, cuda:1 or cpu") from error
    facts = devices.facts(where)
    if method is not None:
        check_method(method, where)
    return where, facts


def named_kernels(names: Sequence[str], facts: DeviceFacts) -> tuple[tuple[str, str], ...]:
    """The named kernels; by default all that the device runs, but the oracle itself."""
    from sage_plugin.families import ATTENTION

    named = [ATTENTION.parse_kernel(text) for text in names]
    if any(kernel == "auto" for kernel, _ in named):
        raise UsageError("--kernel auto: name the kernels to compare, or leave --kernel out")
    every = [(kernel, "auto") for kernel in ATTENTION.kernels_of(facts) if kernel != "torch"]
    return tuple(named or every)


def _refuse_long(suite: Suite, plan: BenchPlan) -> None:
    from sage_plugin.bench.forecast import PATIENCE_S, cpu_seconds

    extra = () if plan.reference is None else (plan.reference,)
    seconds = cpu_seconds(suite.cases, (*extra, *plan.kernels))
    if seconds > PATIENCE_S:
        raise UsageError(
            f"this would take about {_duration(seconds)} on a CPU, where kernels are emulated and "
            "times say nothing: use fewer or smaller inputs (--max-inputs, --kernel), or --force"
        )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1.0, seconds / 60):.0f} minutes"


def _run(suite: Suite, plan: BenchPlan, where: torch.device) -> tuple[list[Table], list[str]]:
    """All tables, and a sentence for each input that failed."""
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from sage_plugin.bench.compare import run_case

    tables, missed = [], []
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("", total=len(suite.cases))
        for case in suite.cases:
            progress.update(task, description=case.name)
            try:
                tables.append(run_case(case, plan, device=where))
            except (UnsupportedInputError, CaptureError) as error:
                if len(suite.cases) == 1:
                    raise
                missed.append(str(error))
            progress.advance(task)
    if not tables:
        raise UnsupportedInputError(f"no input could be run: {missed[0]}")
    return tables, missed


def _show(
    tables: Sequence[Table], metrics: Sequence[str], left_out: Sequence[str], *, to_stderr: bool
) -> None:
    from sage_plugin.cli.bench_table import render, render_difference, render_summary

    console = stderr if to_stderr else stdout
    for table in tables:
        console.print(render(table, metrics, width=console.width), soft_wrap=False)
        for row in table.rows:
            if row.difference is not None:
                console.print(render_difference(row, row.difference), soft_wrap=False)
    if len(tables) > 1:
        console.print(render_summary(tables), soft_wrap=False)
    for sentence in left_out:
        stderr.print(f"left out: {sentence}", style="yellow", markup=False)


def _write(
    tables: Sequence[Table],
    facts: DeviceFacts,
    csv: str | None,
    json: str | None,
    folder: Path | None,
) -> None:
    """The files, then where they are and what to do next."""
    from sage_plugin import device as devices
    from sage_plugin.bench import report

    texts = ((csv, report.csv_text), (json, report.json_text))
    written = []
    for name, text_of in texts:
        if name is None:
            continue
        text = text_of(tables, facts, devices.toolchain())
        if name == "-":
            typer.echo(text, nl=False)
        else:
            files.write_atomically(Path(name), text)
            written.append(name)
    if written:
        stderr.print(f"Wrote {' and '.join(written)}.", markup=False, highlight=False)
    stderr.print(_advice(tables, folder), markup=False, highlight=False)


def _advice(tables: Sequence[Table], folder: Path | None) -> str:
    """What to run next."""
    if tables[0].rows[0].source == "capture":
        return f"Next: sage tune --from-captures {folder or DEFAULT_FOLDER}"
    return "Next: sage capture, to compare the kernels on your model's own tensors"


def _judge(tables: Sequence[Table]) -> None:
    """Raise where a kernel failed its gate, or could not run."""
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
