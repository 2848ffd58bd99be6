"""Tuning from Python, at the start of a service: what a model will call, within a time."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sage_plugin import device as devices
from sage_plugin.device import Gpu
from sage_plugin.errors import UsageError
from sage_plugin.families import ATTENTION, Family, describe, family
from sage_plugin.plugin.owners import modules_of
from sage_plugin.plugin.patch import handle_of
from sage_plugin.plugin.plan.expert_calls import expert_shapes
from sage_plugin.plugin.plan.model_calls import CallWishes, calls_of, config_of
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import GROUPED_LINEAR, AnyShape, DeviceFacts, Trial
from sage_plugin.tune.configs import inputs as tuning_inputs
from sage_plugin.tune.configs import lanes
from sage_plugin.tune.configs import plan as plans
from sage_plugin.tune.configs.inputs import TuningInputs
from sage_plugin.tune.configs.outcome import TuneReport
from sage_plugin.tune.configs.plan import TuningRequest
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.run.observer import Observer
from sage_plugin.tune.run.study import Study
from sage_plugin.tune.search.search import SearchLimits

_FORWARD = ("_call_impl", os.path.join("torch", "nn", "modules", "module.py"))
"""Where a module's forward is called, as a frame of the call stack tells it."""
FEW_HEADS = 4
"""Of a recorded first step: errors are judged on them, times are of the whole call."""


@dataclass(frozen=True, slots=True)
class AutotuneProgress:
    """How far it is.

    Attributes:
        study: number of the call that is tuned, from 1.
        studies: how many calls are tuned.
        tried: configs of it that were tried.
        best_ms: the best time so far, `None` before the first.
    """

    study: int
    studies: int
    tried: int
    best_ms: float | None


@dataclass(frozen=True, slots=True)
class AutotuneReport:
    """What came of it.

    Attributes:
        calls: shapes that the model or the recording has.
        tuned: those that were tuned now, the rest have configs or are the host's.
        report: what the session did, `None` where there was nothing to do.
    """

    calls: tuple[AnyShape, ...]
    tuned: tuple[AnyShape, ...]
    report: TuneReport | None

    @property
    def complete(self) -> bool:
        """Whether it was not cancelled; the next call goes on where a cancelled one was."""
        return self.report is None or not self.report.interrupted


def autotune(
    target: object,
    *,
    budget_s: float,
    op: str = ATTENTION.name,
    only_missing: bool = True,
    first_step: Callable[[], object] | None = None,
    seq_lens: Sequence[int] = (),
    device: str | None = None,
    gpus: str | None = None,
    num_workers: int | None = None,
    config_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[AutotuneProgress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> AutotuneReport:
    """Tune the calls of a model or a recording before the first request, and return.

    Candidates are compiled and run in processes of their own; a program that starts processes keeps
    its own start under `if __name__ == "__main__":`. Configs are used by calls from then on.

    Args:
        target: a folder of captures, or a pipeline or model. Of the latter two the shapes are known
            from its configuration, or from `first_step`.
        budget_s: seconds for all of it; what was tried is in `tuning_runs`, and the next call goes
            on from there.
        op: op family: `"attention"`, `"linear"`, or `"grouped_linear"` for the experts of mixtures.
        only_missing: leave out calls that have a tuned config, near ones too.
        first_step: runs the model once, for example
            `lambda: pipe(prompt, num_inference_steps=1)`; tuned are the calls that it makes, on
            what it computes.
        seq_lens: lengths, for a model whose configuration does not tell; tokens of a forward for
            experts.
        device: where to tune, by torch's name; by default the model's.
        gpus: GPUs of one kind that share the calls instead, `"all"` or numbers such as `"0,1"`.
        num_workers: compile processes for a GPU, by default by cores; each takes 0.8 GB.
        config_dir: folder of configs to write to, by default the user's.
        progress: called after each config that was tried.
        cancelled: asked after each config; once it says true, tuning ends with the best so far.

    Raises:
        UsageError: it is called inside of a forward, the model's calls are not known, or `gpus`
            names what is not there, or beside `device`.
        CaptureError: the recording cannot be read.
        TuningError: no config of any call passed the gate.

    Example:
        >>> autotune(pipe, budget_s=600)  # doctest: +SKIP
    """
    if _inside_a_forward():
        raise UsageError("autotune inside of a model's forward: call it between requests")
    if gpus is not None and device is not None:
        raise UsageError(f"gpus={gpus!r} and device={device!r} both say where: leave one out")
    where = None if config_dir is None else Path(config_dir)
    shared = () if gpus is None else lanes.chosen_gpus(gpus)
    entry = family(op)
    asked = _Asked(entry, budget_s, only_missing, where, shared, num_workers, progress, cancelled)
    if isinstance(target, str | os.PathLike):
        captured = tuning_inputs.from_captures(Path(target), family=entry)
        return asked.tune(captured, (), device)
    modules = modules_of(target)
    device = device or _device_of(modules)
    kernels = _kernels_of(target) if entry is ATTENTION else ()
    if first_step is None:
        drawn = _drawn(entry, modules, seq_lens)
        return asked.tune(tuning_inputs.from_drawn(drawn), kernels, device)
    with tempfile.TemporaryDirectory(prefix="sage-autotune-") as folder:
        recorded = _recorded(entry, target, first_step, Path(folder) / "captures")
        return asked.tune(recorded, kernels, device)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `autotune` was asked for, but for the calls."""

    family: Family
    budget_s: float
    only_missing: bool
    config_dir: Path | None
    gpus: tuple[Gpu, ...]
    num_workers: int | None
    progress: Callable[[AutotuneProgress], None] | None
    cancelled: Callable[[], bool] | None

    def tune(
        self, found: TuningInputs, kernels: tuple[str, ...], device: str | None
    ) -> AutotuneReport:
        """Tune those of some calls that want it."""
        if self.gpus:
            device = f"cuda:{self.gpus[0].index}"
        facts = devices.chosen(device)[1]
        kernels = kernels or (plans.usual_kernel(self.family, facts),)
        calls = tuple(group.shape for group in found.groups)
        groups = tuple(g for g in found.groups if self._wants(g.shape, kernels[0], facts))
        if not groups:
            return AutotuneReport(calls, (), None)
        plan = plans.build(
            TuningRequest(
                inputs=TuningInputs(groups, found.notes),
                kernels=kernels,
                device=device,
                gpus=self.gpus,
                config_dir=self.config_dir,
                limits=SearchLimits(budget_s=self.budget_s),
                family=self.family,
            )
        )
        follower = _Follower(len(plan.studies), self.progress, self.cancelled)
        runner, *more = lanes.lanes(plan, self.num_workers)
        report = tune(plan, runner, follower, argv=["sage_plugin.autotune"], more_lanes=more)
        return AutotuneReport(calls, tuple(study.timed.shape for study in plan.studies), report)

    def _wants(self, shape: AnyShape, kernel: str, facts: DeviceFacts) -> bool:
        """Whether a call runs on a kernel, and on its default config if only those are wanted."""
        name, variant = self.family.parse_kernel(kernel)
        decision = self.family.decide(shape, facts, kernel=name, variant=variant)
        if decision.reason is not None:
            return False
        key = self.family.call_key(shape, decision)
        folder = None if self.config_dir is None else str(self.config_dir)
        found = self.family.find_launch(key, facts, config_dir=folder)
        return found is not None and (not self.only_missing or found.source == "default")


class _Follower(Observer):
    """Tells how far a session is, and ends it as Ctrl-C does when it is cancelled."""

    def __init__(
        self,
        studies: int,
        progress: Callable[[AutotuneProgress], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._studies, self._progress, self._cancelled = studies, progress, cancelled
        self._told: dict[str, AutotuneProgress] = {}

    def study_started(self, study: Study, *, done: int, total: int) -> None:
        number = len(self._told) + 1
        self._told[study.id] = AutotuneProgress(number, self._studies, done, None)

    def trial_finished(self, study: Study, trial: Trial) -> None:
        told = self._told[study.id]
        best_ms = told.best_ms
        if trial.time is not None:
            best_ms = min(best_ms or trial.time.median_ms, trial.time.median_ms)
        told = dataclasses.replace(told, tried=told.tried + 1, best_ms=best_ms)
        self._told[study.id] = told
        if self._progress is not None:
            self._progress(told)
        if self._cancelled is not None and self._cancelled():
            raise KeyboardInterrupt


def _recorded(
    entry: Family, target: object, first_step: Callable[[], object], folder: Path
) -> TuningInputs:
    """The calls of a first step, a few heads or rows of each shape."""
    from sage_plugin.capture.recording.recorder import record

    limit = tuning_inputs.MAX_CAPTURES_PER_KEY
    part: dict[str, Any] = {"heads": FEW_HEADS, "batch": [0]} if entry is ATTENTION else {}
    with record(target, folder, per_shape=limit, ops=entry.name, **part):
        first_step()
    return tuning_inputs.from_captures(folder, family=entry)


def _drawn(
    entry: Family, modules: Sequence[nn.Module], seq_lens: Sequence[int]
) -> Iterator[ReplayInputs]:
    if entry.name not in (ATTENTION.name, GROUPED_LINEAR):
        raise UsageError(f"op={entry.name!r} is not known from configurations: give first_step")
    for module in modules:
        config = config_of(module)
        for shape in _shapes(entry, config, tuple(seq_lens)):
            yield ReplayInputs(shape, describe(shape))


def _shapes(
    entry: Family, config: Mapping[str, Any], seq_lens: tuple[int, ...]
) -> Iterator[AnyShape]:
    """The calls of a model of a configuration."""
    if entry is ATTENTION:
        yield from (call.shape for call in calls_of(config, CallWishes(seq_lens=seq_lens)))
        return
    if not seq_lens:
        raise UsageError(f"op={entry.name!r} needs seq_lens: tokens of a forward, as [1, 4096]")
    yield from expert_shapes(config, seq_lens, str(config.get("dtype") or "bfloat16"))


def _kernels_of(target: object) -> tuple[str, ...]:
    """The kernel that a patched model runs on; empty for the device's default."""
    handle = handle_of(target)
    layers = list(handle.layers.values()) if handle is not None else []
    if not layers or layers[0].state.options.kernel in ("auto", "sdpa"):
        return ()
    options = layers[0].state.options
    return (options.kernel if options.variant == "auto" else f"{options.kernel}:{options.variant}",)


def _device_of(modules: Sequence[nn.Module]) -> str | None:
    tensor = next((p for module in modules for p in module.parameters()), None)
    return None if tensor is None or tensor.device.type == "meta" else str(tensor.device)


def _inside_a_forward() -> bool:
    """Whether a module's forward is on the call stack of this thread."""
    name, file = _FORWARD
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file):
            return True
    return False
