"""From a request to studies: which kernels on which inputs over which configs, written where."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sage_plugin import device as devices
from sage_plugin.device import Gpu
from sage_plugin.errors import CaptureError, ConfigError, OutputError, UsageError
from sage_plugin.families import ATTENTION, Family
from sage_plugin.measure.timers import check_method
from sage_plugin.registry import load
from sage_plugin.schema import AnyKey, AnyLaunch, DeviceFacts
from sage_plugin.tune.configs.inputs import InputGroup, TuningInputs
from sage_plugin.tune.configs.space_file import SpaceFile
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.study import Study, Timer, digest
from sage_plugin.tune.search.search import ErrorLimit, SearchLimits

CPU_KERNEL = "fav3_sage"
"""What attention is tuned for on a CPU, unless a kernel is named: a GPU's default kernel."""

TIMERS = {"cpu": Timer("wall", screen_rounds=3, screen_s=1.0, race_rounds=20, race_s=10.0)}
GPU_TIMER = Timer("events")
DEFAULT_TIMEOUT_S = 300.0
MAX_TIMEOUT_S = 1e6
"""Eleven days; the operating system cannot wait for much more."""

RUNS = Path("tuning_runs")


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What the caller wants tuned.

    Attributes:
        inputs: what to tune on.
        kernels: `kernel` or `kernel:variant`; empty for the device's default.
        device: torch's name of a device, `None` for the GPU where there is one.
        gpus: GPUs that share the studies, one lane each; empty for the one of `device`.
        space: search space in place of the kernels' own.
        timer: how to time, `None` for the device's default.
        method: timing method, `None` for the timer's.
        shard: one part of several of the studies, as `(1, 4)`, for a machine of its own.
        config_dir: folder of configs to write to, `None` for the user's.
        runs_dir: folder that holds run folders.
        run_name: name of the run folder, `None` for one that the same request always gets.
        min_gain: smallest gain worth an entry.
        limits: when to stop early.
        error_limit: how inexact a winner may be.
        timeout_s: longest that one trial may take.
        seed: of the search order and of the order within timing rounds.
        fresh: start over instead of going on from the ledger.
        update: write winners into the registry; without it they are in the run's results alone.
        family: the op family that is tuned.
    """

    inputs: TuningInputs
    kernels: tuple[str, ...] = ()
    device: str | None = None
    gpus: tuple[Gpu, ...] = ()
    space: SpaceFile | None = None
    timer: Timer | None = None
    method: str | None = None
    shard: tuple[int, int] = (1, 1)
    config_dir: Path | None = None
    runs_dir: Path = RUNS
    run_name: str | None = None
    min_gain: float = 0.01
    limits: SearchLimits = field(default_factory=SearchLimits)
    error_limit: ErrorLimit = field(default_factory=ErrorLimit)
    timeout_s: float = DEFAULT_TIMEOUT_S
    seed: int = 0
    fresh: bool = False
    update: bool = True
    family: Family = ATTENTION


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """A request made concrete.

    `studies` come the most expensive call first, `calls` in the same order; `notes` say what was
    left out.
    """

    request: TuningRequest
    studies: tuple[Study, ...]
    calls: tuple[int, ...]
    notes: tuple[str, ...]
    facts: DeviceFacts
    run_folder: Path
    registry_path: Path


def usual_kernel(family: Family, facts: DeviceFacts) -> str:
    """Return what is tuned where no kernel is named."""
    return CPU_KERNEL if facts.kind == "cpu" and family is ATTENTION else "auto"


def build(request: TuningRequest) -> TuningPlan:
    """Make a plan; nothing is written and no kernel runs.

    Raises:
        UsageError: a kernel that has nothing to tune, a bad run name or number.
        CaptureError: no input can run on any of the kernels.
        DeviceError: the device does not exist.
        OutputError: there is no folder to write configs to.
    """
    _check_numbers(request)
    chosen = f"cuda:{request.gpus[0].index}" if request.gpus else request.device
    device, facts = devices.chosen(chosen)
    studies, calls, notes = [], [], list(request.inputs.notes)
    for group in request.inputs.groups:
        for text in request.kernels or (usual_kernel(request.family, facts),):
            study = _study(request, group, text, str(device), facts, notes)
            if study is not None and study not in studies:
                studies.append(study)
                calls.append(group.calls)
    if not studies:
        reasons = "; ".join(dict.fromkeys(notes)) or "there are no inputs"
        raise CaptureError(f"nothing can be tuned: {reasons}")
    run_name = request.run_name or _default_name(request, facts, device.index)
    part, parts = request.shard
    if parts > 1:
        run_name += f".shard-{part}-of-{parts}"
        studies, calls = studies[part - 1 :: parts], calls[part - 1 :: parts]
        if not studies:
            raise UsageError(f"--shard {part}/{parts}: there are fewer calls than shards")
    return TuningPlan(
        request=request,
        studies=tuple(studies),
        calls=tuple(calls),
        notes=tuple(dict.fromkeys(notes)),
        facts=facts,
        run_folder=request.runs_dir / run_name,
        registry_path=load.file_path(_config_root(request), facts.slug, request.family.name),
    )


def _study(
    request: TuningRequest,
    group: InputGroup,
    text: str,
    device: str,
    facts: DeviceFacts,
    notes: list[str],
) -> Study | None:
    family, shape = request.family, group.shape
    kernel, variant = family.parse_kernel(text)
    decision = family.decide(shape, facts, kernel=kernel, variant=variant)
    if decision.reason is not None and decision.reason.cause.left_by_auto:  # tuned all the same
        kernel = family.automatic_kernel(facts)
        decision = family.decide(shape, facts, kernel=kernel, variant=variant)
    family.refuse_untuned(text, decision, facts)
    what = f"{text} on {family.describe(shape)}"
    if decision.reason is not None:
        notes.append(f"{what}: goes to the host's {family.name}, {decision.reason}")
        return None
    key = family.call_key(shape, decision)
    try:
        space = _space(request, key, facts, notes)
    except ConfigError as error:
        notes.append(f"{what}: {error}")
        return None
    return Study(
        key=key,
        sources=group.sources,
        timed=group.timed,
        space=space,
        gate=family.gate_for(key.kernel),
        timer=_timer(request, device, facts).of_space(len(space)),
        device=device,
        facts=facts,
        toolchain=devices.toolchain(key.family),
    )


def _timer(request: TuningRequest, device: str, facts: DeviceFacts) -> Timer:
    timer = request.timer or TIMERS.get(facts.kind, GPU_TIMER)
    if request.method is None:
        return timer
    check_method(request.method, torch.device(device))
    return dataclasses.replace(timer, method=request.method)


def _space(
    request: TuningRequest, key: AnyKey, facts: DeviceFacts, notes: list[str]
) -> tuple[AnyLaunch, ...]:
    """Legal configs, the default first; what cannot run is left out before it is compiled."""
    given, family = request.space, request.family
    if given is None:
        what, every = f"{key.kernel}:{key.variant}", family.search_space(key, facts)
    else:
        what, every = str(given.path), tuple(given.configs(family.default_launch(key, facts)))
        notes += given.notes
    legal, refused = [], dict[str, list[str]]()
    for config in every:
        reason = family.illegal_reason(config, key, facts)
        if reason is None:
            legal.append(config)
        else:
            refused.setdefault(re.sub(r"\d+", "N", reason), []).append(reason)
    for kind in sorted(refused.values(), key=len, reverse=True):
        notes.append(f"{what}: {len(kind)} configs cannot run here: {kind[0]}")
    return tuple(legal)


def _default_name(request: TuningRequest, facts: DeviceFacts, index: int | None) -> str:
    """A name that the same inputs on the same devices always get, so that a run is resumed.

    GPUs count by their UUIDs: a command on each of two equal ones has a folder of its own.
    """
    labels = sorted(
        f"{source.label} {source.shape.to_json()}"
        for group in request.inputs.groups
        for source in group.sources
    )
    uuids = sorted(gpu.uuid for gpu in request.gpus)
    if not uuids and facts.kind != "cpu" and torch.cuda.is_available():
        uuids = [gpu.uuid for gpu in devices.gpus() if gpu.index == index]
    return f"{facts.slug}-{digest([*labels, *uuids])[:8]}"


def _config_root(request: TuningRequest) -> Path:
    root = request.config_dir or load.user_dir()
    if root is None:
        raise OutputError("no folder for configs: install platformdirs, or name one (--config-dir)")
    return root.expanduser()


def _check_numbers(request: TuningRequest) -> None:
    limits, errors = request.limits, request.error_limit
    least = {
        "--max-error": (1.0 if errors.max_error is None else errors.max_error, 0.0),
        "--timeout": (request.timeout_s, 0.0),
        "--budget": (1.0 if limits.budget_s is None else limits.budget_s, 0.0),
        "--max-trials": (1 if limits.max_trials is None else limits.max_trials, 0),
        "--patience": (1 if limits.patience is None else limits.patience, 0),
    }
    for option, (value, low) in least.items():
        if not value > low:
            raise UsageError(f"{option} {value}: must be above {low}")
    if not request.timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(
            f"--timeout {request.timeout_s}: must be at most {MAX_TIMEOUT_S:g} seconds"
        )
    if not 1 <= request.shard[0] <= request.shard[1]:
        raise UsageError(f"--shard {request.shard[0]}/{request.shard[1]}: count from 1/N to N/N")
    if not errors.max_ratio >= 1:
        raise UsageError(
            f"--max-error-ratio {errors.max_ratio}: must be at least 1, the default's own error"
        )
    if not 0 <= request.min_gain < 1:
        raise UsageError(f"--min-gain {request.min_gain}: must be from 0 to below 1 (0.01 is 1 %)")
    run_folder.check_name(request.run_name)
