"""`sage demo`: the whole path on the embedded video model, with a sentence on each step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli import output_folder
from sage_plugin.cli.clips import ClipOptions, checked_policy
from sage_plugin.cli.console import counted, progress, say, stderr, stdout
from sage_plugin.cli.options import Device, flattened, shown_first
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import SageError, UsageError

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.clips.draw import Drawn, Subject
    from sage_plugin.bench.clips.run_config import RunConfig
    from sage_plugin.bench.rows import Table
    from sage_plugin.schema import DeviceFacts

CAPTURES = 6
BENCHED = 2
TUNE_BUDGET_S = 120.0
MINUTES_ON_A_CPU = "All steps take about 2 minutes on two idle cores."
MARKER = ".sage-demo"
"""A file that says that a folder is a demo's own, to be replaced by the next demo."""

Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for everything that the demo makes.")
]
Kernel = Annotated[str, typer.Option(help="Kernel of the patched run.")]
PolicyOf = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="NAME", help="Preset or file of rules in place of the patched kernel."
    ),
]


EXAMPLES = ("sage demo", "sage demo --policy balanced --out demo_of_a_policy")


@shown_first("kernel", "policy", "out")
@flattened
def command(
    clip: ClipOptions,
    out: Out = Path("demo_output"),
    kernel: Kernel = "auto",
    device: Device = None,
    policy: PolicyOf = None,
) -> None:
    """Generate a clip, record its attention, tune and measure kernels, and generate it patched."""
    from sage_plugin import device as devices
    from sage_plugin.bench.clips.draw import draw_once
    from sage_plugin.bench.clips.latent_drift import LatentDrift
    from sage_plugin.bench.clips.run_config import RunConfig
    from sage_plugin.demo.film import save_comparison

    where, facts = devices.chosen(device)
    size, kernel = clip.size_on(where), _tunable_kernel(kernel, facts)
    steps = clip.num_inference_steps or SIZES[size].default_steps
    rules = None if policy is None else checked_policy(policy)
    on = kernel if policy is None else f"kernels by the policy {policy}"
    config = RunConfig("patched", kernel, rules)
    run = _Demo(out, where, facts, kernel, steps)
    output_folder.prepare(out, marker=MARKER, command="sage demo")
    takes = f" {MINUTES_ON_A_CPU}" if (where.type, size) == ("cpu", "small") else ""
    say(f"1. Load: a 4.9 M parameter CogVideoX transformer, on {where.type}, size {size}.{takes}")
    with progress("load the model"):
        subject = clip.subject(where, steps, None)
        subject.denoisers([config])  # a policy that names no layer is refused before anything runs
    drift = LatentDrift()
    with counted("generate the baseline", steps) as advance:
        baseline = draw_once(subject, RunConfig("unpatched"), drift, advance)
    say(f"2. Generate: {steps} steps with the host's attention, {_step(baseline)} each.")
    say(f"3. Record: {run.record(subject)} captures of real Q, K and V in {run.captures}.")
    run.tune()
    tables = run.measure()
    subject = replace(subject, config_dir=run.configs)
    with counted(f"generate on {on}", steps) as advance:
        patched = draw_once(subject, config, drift, advance)
    if not patched.report.kernel_calls():
        raise SageError(
            f"none of the {patched.report.total_calls()} attention calls of the patched run ran on "
            f"a kernel: {patched.report.text()}"
        )
    save_comparison({"unpatched": baseline.frames, "patched": patched.frames}, run.film)
    run.finish(config, on, baseline, patched, tables)


def _tunable_kernel(kernel: str, facts: DeviceFacts) -> str:
    """The kernel that is tuned, by name."""
    from sage_plugin.families import ATTENTION
    from sage_plugin.families.attention.entry import refuse_gpu_variant
    from sage_plugin.kernels.attention.dispatch import environment_choice

    name, variant = ATTENTION.parse_kernel(kernel)
    if name == "auto":
        name = ATTENTION.automatic_kernel(facts)
    if name in ("torch", "sdpa"):
        raise UsageError(
            f"--kernel {kernel!r} has nothing to tune; choose fav2, sage, fav3_sage or fav3_fp8"
        )
    refuse_gpu_variant(name, environment_choice()[1] if variant == "auto" else variant, facts)
    return name if variant == "auto" else f"{name}:{variant}"


@dataclass(frozen=True, slots=True)
class _Demo:
    """A run of the demo: what its steps share."""

    folder: Path
    device: torch.device
    facts: DeviceFacts
    kernel: str
    steps: int

    @property
    def captures(self) -> Path:
        return self.folder / "captured_inputs"

    @property
    def configs(self) -> Path:
        return self.folder / "configs"

    @property
    def film(self) -> Path:
        return self.folder / "side_by_side.gif"

    def record(self, subject: Subject) -> int:
        """Record attention inputs while the baseline is drawn; the number of captures."""
        from sage_plugin.capture.recording.recorder import record

        with (
            counted("record attention inputs", self.steps) as advance,
            record(
                subject.pipe, self.captures, max_captures=CAPTURES, total_steps=self.steps
            ) as recorder,
        ):
            subject.draw(advance)
        return recorder.summary.files

    def tune(self) -> None:
        """Tune the kernel on the captures; the winners go to `configs` in the run's folder."""
        from sage_plugin.cli.tune_view import outcome_table
        from sage_plugin.cli.tuning.progress import ProgressView
        from sage_plugin.tune.configs.inputs import from_captures
        from sage_plugin.tune.configs.lanes import lanes
        from sage_plugin.tune.configs.plan import TuningRequest, build
        from sage_plugin.tune.configs.session import tune
        from sage_plugin.tune.search.search import SearchLimits

        request = TuningRequest(
            inputs=from_captures(self.captures),
            kernels=(self.kernel,),
            device=str(self.device),
            config_dir=self.configs,
            runs_dir=self.folder / "tuning_runs",
            limits=SearchLimits(budget_s=TUNE_BUDGET_S),
        )
        plan = build(request)
        (runner,) = lanes(plan)
        with ProgressView(stderr) as view:
            report = tune(plan, runner, view, argv=("sage", "demo"))
        say(f"4. Tune: {self.kernel} searched on the captures under its accuracy gate.")
        stdout.print(outcome_table(report.outcomes, width=stdout.width))
        say(f"   Winners: {plan.registry_path}, every trial: {plan.run_folder}.")

    def measure(self) -> list[Table]:
        """Measure all kernels on some of the captures, beside the host's attention."""
        from sage_plugin import device as devices
        from sage_plugin.bench.compare import BenchPlan, run_case
        from sage_plugin.bench.report import csv_text, json_text
        from sage_plugin.bench.suite import captured
        from sage_plugin.cli.bench.table import render
        from sage_plugin.cli.options import named_kernels

        kernels = named_kernels((), self.facts)
        plan = BenchPlan(kernels, ("fav2", "auto"), config_dir=str(self.configs))
        tables = []
        with counted("measure all kernels", BENCHED) as advance:
            for case in captured(self.captures, BENCHED).cases:
                tables.append(run_case(case, plan, device=self.device))
                advance()
        for name, text in (("bench.csv", csv_text), ("bench.json", json_text)):
            content = text(tables, self.facts, devices.toolchain())
            files.write_atomically(self.folder / name, content)
        say("5. Measure: every kernel on captured inputs, time beside error.")
        stdout.print(render(tables, ("time", "throughput"), width=stdout.width), soft_wrap=False)
        say(f"   Tables: {self.folder / 'bench.csv'}.")
        return tables

    def finish(
        self, config: RunConfig, on: str, baseline: Drawn, patched: Drawn, tables: list[Table]
    ) -> None:
        """Write the closing sentences, on the terminal and in the folder."""
        import numpy as np

        from sage_plugin.demo.quality import quality

        report, found = patched.report, quality(patched.frames, baseline.frames)
        worst = np.abs(patched.frames - baseline.frames).max()
        sentences = [
            f"6. Generate again: {report.kernel_calls()} of {report.total_calls()} attention calls "
            f"ran on {on} with the config of step 4.",
            self._speed(config, baseline, patched, tables),
            f"The clips agree to {found.mean_psnr_db:.1f} dB PSNR (higher is closer; worst frame "
            f"{found.min_psnr_db:.1f}); one pixel differs by {worst:.2f} of full white.",
            "Sampling amplifies small differences: look at the clips.",
        ]
        say(*sentences, report.text())
        summary = "\n".join([*sentences, "", report.text(), ""])
        files.write_atomically(self.folder / "summary.txt", summary)
        gpu = ", on a GPU this time with a speed" if self.device.type == "cpu" else ""
        say(
            f"Look at {self.film}: the unpatched clip, the patched one, and their difference.",
            f"Next, your own pipeline{gpu}:",
            "    sage_plugin.patch(pipe)",
            "    pipe(...)  # as before",
            "    print(sage_plugin.report(pipe).text())",
        )

    def _speed(
        self, config: RunConfig, baseline: Drawn, patched: Drawn, tables: list[Table]
    ) -> str:
        """What the patched run gained in time, for one attention call and for a whole step."""
        if self.device.type == "cpu":
            return "On a CPU kernels are emulated: not a speed."
        if config.policy is not None:  # whose steps differ, so that a median would hide some
            ours, theirs = (_ms(fmean(one.steps_ms)) for one in (patched, baseline))
            return f"A step takes {ours} instead of {theirs} in the mean of the run."
        step = f"A step takes {_step(patched)} instead of {_step(baseline)}."
        times = {row.kernel: row.time.median_ms for row in tables[0].rows}
        kernel_ms, host_ms = times.get(self.kernel.split(":")[0]), times.get("sdpa")
        if kernel_ms is None or host_ms is None:
            return step
        call = f"An attention call takes {kernel_ms:.3g} ms instead of {host_ms:.3g} ms. {step}"
        if kernel_ms < host_ms and median(patched.steps_ms) >= median(baseline.steps_ms):
            call += " A step of so small a model is bound by launches from the host."
        return call


def _step(clip: Drawn) -> str:
    return _ms(median(clip.steps_ms)) if clip.steps_ms else "-"


def _ms(time_ms: float) -> str:
    return f"{time_ms:.0f} ms" if time_ms >= 10 else f"{time_ms:.2f} ms"
