"""`sage demo`: the whole path on the embedded video model, with a sentence on each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.call_shape import checked_seed
from sage_plugin.cli.console import stderr, stdout
from sage_plugin.cli.policy.prove import checked_policy
from sage_plugin.errors import UsageError

if TYPE_CHECKING:
    from sage_plugin.bench.rows import Table
    from sage_plugin.cli.demo_run import Clip, ClipDifference, DemoOptions
    from sage_plugin.plugin.report import PluginReport

Size = Annotated[
    str | None, typer.Option(help="small or large (default: large on a GPU, small on a CPU).")
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for everything that the demo makes.")
]
Kernel = Annotated[str, typer.Option(help="Kernel of the patched run.")]
Digit = Annotated[int, typer.Option(min=0, max=9, help="Digit to draw.")]
Steps = Annotated[int | None, typer.Option(min=2, help="Denoising steps (default 15).")]
Seed = Annotated[int, typer.Option(help="Of the starting noise.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu (default: a GPU if any).")]

Policy = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Preset or file of rules in place of the patched kernel."),
]


def command(
    size: Size = None,
    out: Out = Path("demo_output"),
    kernel: Kernel = "auto",
    digit: Digit = 2,
    steps: Steps = None,
    seed: Seed = 1,
    device: Device = None,
    policy: Policy = None,
) -> None:
    """Generate a clip, record its attention, tune and measure kernels, and generate it patched."""
    from sage_plugin.cli import demo_run as run

    ask = _ask(size, out, kernel, digit, steps, seed, device, policy)
    run.prepare_folder(ask.folder)
    _say(f"1. Load: a 4.9 M parameter CogVideoX transformer, on {ask.device}, size {ask.size}.")
    with _bar("load the model", None):
        pipe = run.load(ask)
        with ask.patched(pipe):
            pass  # a policy that names no layer of the model is refused before anything runs
    with _bar("generate with the host's attention", ask.steps) as advance:
        host = run.generate(pipe, ask, advance)
    _say(f"2. Generate: {ask.steps} steps with the host's attention, {_step(host)} a step.")
    with _bar("record attention inputs", ask.steps) as advance:
        files = run.record(pipe, ask, advance)
    _say(f"3. Record: {files} captures of real Q, K and V in {ask.folder / 'captured_inputs'}.")
    _tune(ask)
    tables = _measure(ask)
    with _bar(f"generate on {ask.way}", ask.steps) as advance:
        patched, report = run.generate_patched(pipe, ask, advance)
    difference = run.compare(host, patched)
    run.save(ask, host, patched)
    _finish(ask, host, patched, report, difference, tables)


def _ask(
    size: str | None,
    out: Path,
    kernel: str,
    digit: int,
    steps: int | None,
    seed: int,
    device: str | None,
    policy: str | None,
) -> DemoOptions:
    """The options checked and completed for the device."""
    import torch

    from sage_plugin import device as devices
    from sage_plugin.cli.demo_run import DemoOptions
    from sage_plugin.demo.sizes import SIZES
    from sage_plugin.kernels.attention import dispatch
    from sage_plugin.tune.configs.plan import refuse_gpu_variant

    checked_seed(seed)
    if policy is not None:
        checked_policy(policy)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cuda", "cpu"):
        raise UsageError(f"--device {device!r}: allowed are cuda and cpu")
    facts = devices.facts(chosen)
    name = size or ("small" if chosen == "cpu" else "large")
    if name not in SIZES:
        raise UsageError(f"--size {size!r}: allowed are {', '.join(SIZES)}")
    resolved, variant = dispatch.parse_kernel(kernel)
    if resolved == "auto":
        resolved = dispatch.automatic_kernel(facts)
    if resolved in ("torch", "sdpa"):
        raise UsageError(
            f"--kernel {kernel!r} has nothing to tune; choose fav2, sage, fav3_sage or fav3_fp8"
        )
    asked = dispatch.environment_choice()[1] if variant == "auto" else variant
    refuse_gpu_variant(resolved, asked, facts)
    text = resolved if variant == "auto" else f"{resolved}:{variant}"
    return DemoOptions(
        out, name, text, digit, steps or SIZES[name].default_steps, seed, chosen, policy
    )


def _tune(ask: DemoOptions) -> None:
    from sage_plugin.cli import demo_run as run
    from sage_plugin.cli.tune_view import ProgressView, outcome_table

    with ProgressView(stderr) as view:
        report = run.tune(ask, view)
    _say(f"4. Tune: {ask.kernel} searched on the captures under its accuracy gate.")
    stdout.print(outcome_table(report.outcomes))
    _say(f"   Winners: {report.plan.registry_path}, every trial: {report.plan.run_folder}.")


def _measure(ask: DemoOptions) -> list[Table]:
    from sage_plugin.cli import demo_run as run
    from sage_plugin.cli.bench_table import render

    with _bar("measure all kernels", run.BENCHED) as advance:
        tables = run.measure(ask, advance)
    _say("5. Measure: every kernel on captured inputs, time beside error.")
    for table in tables:
        stdout.print(render(table, ("time", "throughput"), width=stdout.width))
    _say(f"   Tables: {ask.folder / 'bench.csv'}.")
    return tables


def _speed(ask: DemoOptions, host: Clip, patched: Clip, tables: list[Table]) -> str:
    """What the patched run gained in time, for one attention call and for a whole step."""
    if ask.device == "cpu":
        return "On a CPU kernels are emulated: not a speed."
    if ask.policy is not None:
        return (
            f"A step takes {_ms(patched.mean_step_ms)} instead of {_ms(host.mean_step_ms)} in the "
            "mean of the run."
        )
    step = f"A step takes {_step(patched)} instead of {_step(host)}."
    times = {row.kernel: row.time.median_ms for row in tables[0].rows}
    ours, theirs = times.get(ask.kernel.split(":")[0]), times.get("sdpa")
    if ours is None or theirs is None:
        return step
    call = f"An attention call takes {ours:.3g} ms instead of {theirs:.3g} ms. {step}"
    if ours < theirs and patched.median_step_ms >= host.median_step_ms:
        call += " A step of so small a model is bound by launches from the host."
    return call


def _finish(
    ask: DemoOptions,
    host: Clip,
    patched: Clip,
    report: PluginReport,
    difference: ClipDifference,
    tables: list[Table],
) -> None:
    """The closing sentences, on the terminal and in the folder."""
    shown = report.text()
    sentences = [
        f"6. Generate again: {report.kernel_calls()} of {report.total_calls()} attention calls "
        f"ran on {ask.way} with the config of step 4.",
        _speed(ask, host, patched, tables),
        f"The clips differ by {difference.psnr_db:.1f} dB PSNR "
        f"({difference.worst_frame_psnr_db:.1f} dB in the worst frame), "
        f"{difference.max_abs:.3f} of 1 at most.",
    ]
    for sentence in sentences:
        _say(sentence)
    stdout.print(shown, markup=False)
    summary = "\n".join([*sentences, "", shown, ""])
    (ask.folder / "summary.txt").write_text(summary, encoding="utf-8")
    _say(f"Look at {ask.folder / 'side_by_side.gif'}: host, patched, and their difference.")
    few = " --max-inputs 1" if ask.device == "cpu" else ""
    _say(f"Next: sage bench {ask.folder / 'captured_inputs'} --compare-to-ref fav2{few}")


def _step(clip: Clip) -> str:
    return _ms(clip.median_step_ms)


def _ms(time_ms: float) -> str:
    return f"{time_ms:.0f} ms" if time_ms >= 10 else f"{time_ms:.2f} ms"


def _say(sentence: str) -> None:
    stdout.print(sentence, markup=False)


@contextlib.contextmanager
def _bar(title: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; yields what advances it by one."""
    from rich.progress import (
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns.insert(1, MofNCompleteColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
