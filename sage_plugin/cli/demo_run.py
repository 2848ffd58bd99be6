"""The steps of `sage demo`, in order: generate, record, tune, measure, generate again patched."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin import files
from sage_plugin.cli import own_folder
from sage_plugin.errors import SageError

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.rows import Table
    from sage_plugin.demo.pipeline import DigitVideoPipeline
    from sage_plugin.plugin.patch import PatchHandle
    from sage_plugin.plugin.report import PluginReport
    from sage_plugin.tune.configs.outcome import TuneReport
    from sage_plugin.tune.run.observer import Observer

CAPTURES = 6
BENCHED = 2
TUNE_BUDGET_S = 120.0
MARK = ".sage-demo"
"""A file that says that a folder is a demo's own, to be replaced by the next demo."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What one demo run was asked for.

    Attributes:
        folder: where everything goes.
        size: geometry of the clip, by name.
        kernel: that is tuned, and that the patched run is on where there is no policy.
        digit: that is drawn.
        steps: denoising steps.
        seed: of the starting noise.
        device: `cuda` or `cpu`.
        policy: a preset or a file that the patched run is on, `None` for none.
    """

    folder: Path
    size: str
    kernel: str
    digit: int
    steps: int
    seed: int
    device: str
    policy: str | None = None

    @property
    def way(self) -> str:
        """What the patched run is on, in words."""
        return self.kernel if self.policy is None else f"kernels by the policy {self.policy}"

    def patched(self, pipe: DigitVideoPipeline) -> AbstractContextManager[PatchHandle]:
        """The pipeline on the policy or the kernel, with what was tuned where that is there.

        Raises:
            ConfigError: the policy is not for this pipeline.
        """
        from sage_plugin.plugin.patch import patched

        configs = self.folder / "configs"
        return patched(
            pipe,
            kernel=self.kernel if self.policy is None else "auto",
            policy=self.policy,
            config_dir=configs if configs.is_dir() else None,
        )


@dataclass(frozen=True, slots=True)
class Clip:
    """One generated clip.

    Attributes:
        frames: `(1, F, 1, H, W)` in [0, 1], fp32, on the CPU.
        step_ms: time of each denoising step, the first left out; milliseconds.
    """

    frames: torch.Tensor
    step_ms: tuple[float, ...]

    @property
    def median_step_ms(self) -> float:
        """Median time of a denoising step."""
        ordered = sorted(self.step_ms)
        return ordered[len(ordered) // 2] if ordered else float("nan")

    @property
    def mean_step_ms(self) -> float:
        """Mean time of a denoising step: that of a policy, whose steps differ."""
        return sum(self.step_ms) / len(self.step_ms) if self.step_ms else float("nan")


@dataclass(frozen=True, slots=True)
class ClipDifference:
    """How far the patched clip is from the host's.

    Attributes:
        psnr_db: peak signal-to-noise ratio over the clip; infinite for equal clips.
        worst_frame_psnr_db: of the worst frame.
        max_abs: largest difference of a pixel, of 1.
    """

    psnr_db: float
    worst_frame_psnr_db: float
    max_abs: float


def prepare_folder(folder: Path) -> None:
    """An empty output folder; one that an earlier demo made is replaced, any other is refused.

    Raises:
        UsageError: the folder holds something else.
        OutputError: it cannot be written.
    """
    own_folder.prepare(folder, mark=MARK, command="sage demo")


def load(ask: DemoOptions) -> DigitVideoPipeline:
    """The embedded model on the device: bf16 on a GPU, fp32 on a CPU."""
    import torch

    from sage_plugin.demo import load_pipeline

    dtype = torch.float32 if ask.device == "cpu" else torch.bfloat16
    pipe = load_pipeline(device=ask.device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: DigitVideoPipeline, ask: DemoOptions, on_step: Callable[[], object]) -> Clip:
    """One clip from the run's seed, with the time of every step but the first."""
    import torch

    marks: list[float] = []

    def step(*_: object) -> None:
        if ask.device != "cpu":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        on_step()

    out = pipe(
        ask.digit,
        size=ask.size,
        num_inference_steps=ask.steps,
        generator=torch.Generator().manual_seed(ask.seed),
        callback_on_step_end=step,
    )
    times = tuple(1e3 * (b - a) for a, b in itertools.pairwise(marks))
    return Clip(out.frames.float().cpu(), times)


def record(pipe: DigitVideoPipeline, ask: DemoOptions, on_step: Callable[[], object]) -> int:
    """Record attention inputs while the host's attention draws the clip; the number of captures."""
    from sage_plugin.capture.recording.recorder import record as recording

    with recording(
        pipe,
        ask.folder / "captured_inputs",
        max_captures=CAPTURES,
        total_steps=ask.steps,
    ) as recorder:
        generate(pipe, ask, on_step)
    return recorder.summary.files


def tune(ask: DemoOptions, observer: Observer) -> TuneReport:
    """Tune the kernel on the captures; the winners go to `configs` in the run's folder."""
    from sage_plugin.tune.configs.child_runner import ChildRunner
    from sage_plugin.tune.configs.inputs import from_captures
    from sage_plugin.tune.configs.plan import TuningRequest, build
    from sage_plugin.tune.configs.search import SearchLimits
    from sage_plugin.tune.configs.session import tune as run
    from sage_plugin.tune.run import run_folder

    request = TuningRequest(
        inputs=from_captures(ask.folder / "captured_inputs"),
        kernels=(ask.kernel,),
        device=ask.device,
        config_dir=ask.folder / "configs",
        runs_dir=ask.folder / "tuning_runs",
        limits=SearchLimits(budget_s=TUNE_BUDGET_S),
    )
    plan = build(request)
    runner = ChildRunner(timeout_s=request.timeout_s, log=plan.run_folder / run_folder.LOG)
    return run(plan, runner, observer, argv=("sage", "demo"))


def measure(ask: DemoOptions, on_case: Callable[[], object]) -> list[Table]:
    """Measure all kernels on some of the captures, beside the host's attention."""
    import torch

    from sage_plugin import device as devices
    from sage_plugin.bench.compare import BenchPlan, run_case
    from sage_plugin.bench.report import csv_text, json_text
    from sage_plugin.bench.suite import captured
    from sage_plugin.families import ATTENTION

    facts = devices.facts(ask.device)
    kernels = tuple((k, "auto") for k in ATTENTION.kernels_of(facts) if k != "torch")
    plan = BenchPlan(
        kernels=kernels, reference=("fav2", "auto"), config_dir=str(ask.folder / "configs")
    )
    tables = []
    for case in captured(ask.folder / "captured_inputs", BENCHED).cases:
        tables.append(run_case(case, plan, device=torch.device(ask.device)))
        on_case()
    files.write_atomically(ask.folder / "bench.csv", csv_text(tables, facts, devices.toolchain()))
    files.write_atomically(ask.folder / "bench.json", json_text(tables, facts, devices.toolchain()))
    return tables


def generate_patched(
    pipe: DigitVideoPipeline, ask: DemoOptions, on_step: Callable[[], object]
) -> tuple[Clip, PluginReport]:
    """The same clip on the tuned kernel, or on the kernels that the policy chooses.

    Raises:
        SageError: no attention call ran on a kernel.
    """
    with ask.patched(pipe) as handle:
        clip = generate(pipe, ask, on_step)
        report = handle.report()
    if report.kernel_calls() == 0:
        raise SageError(
            f"none of the {report.total_calls()} attention calls of the patched run ran on "
            f"a kernel: {report.text()}"
        )
    return clip, report


def compare(host: Clip, patched: Clip) -> ClipDifference:
    """Error between the two clips."""
    from sage_plugin.demo.quality import psnr_db

    error = (host.frames.double() - patched.frames.double())[0]
    per_frame = error.square().flatten(1).mean(1)

    return ClipDifference(
        psnr_db=psnr_db(per_frame.mean().item()),
        worst_frame_psnr_db=psnr_db(per_frame.max().item()),
        max_abs=error.abs().max().item(),
    )


def save(ask: DemoOptions, host: Clip, patched: Clip) -> tuple[Path, ...]:
    """Both clips, and the two side by side with their difference, as GIF and contact sheet."""
    import torch

    from sage_plugin.demo.film import save_clips

    gap = (host.frames - patched.frames).abs()
    clips = {
        "host": host.frames,
        "patched": patched.frames,
        "side_by_side": torch.cat([host.frames, patched.frames, gap]),
    }
    paths: list[Path] = []
    for name, frames in clips.items():
        paths += save_clips(frames, ask.folder / name)
    return tuple(paths)
