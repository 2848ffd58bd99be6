"""The time of one denoising step, kernel against kernel, interleaved on the same weights."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from step_peers import PEERS
from torch import nn

import sage_plugin
from sage_plugin.errors import DeviceError
from sage_plugin.measure.clocks import snapshot, stamp
from sage_plugin.measure.timing import Samples, measure
from sage_plugin.plugin.patch import PatchHandle
from sage_plugin.plugin.report import PluginReport
from sage_plugin.schema import JsonRecord, Timing

UNPATCHED, AGAIN = "unpatched", "unpatched again"
COMPILED = ", compiled"
TUNED = ", tuned"
NO_SPEED = "emulation: not a speed"
BUDGET_S = {"cuda": 60.0, "cpu": 3.0}


@dataclass(frozen=True, slots=True)
class StepTime(JsonRecord):
    """One denoising step on one kernel.

    Attributes:
        name: the kernel as it was asked for, `unpatched`, or one of `PEERS`.
        time: of the step; `None` where the kernel is emulated.
        ratio: time of the unpatched step over this one's, of the compiled one where this is.
        ratio_low: lower end of its 95 % interval.
        ratio_high: upper end.
        attention_calls: attention calls of the step.
        kernel_calls: those that ran on a kernel, not on the host's attention.
        linear_calls: calls of linears that ran on a kernel, by kernel and backend.
        ran: calls by what they ran on: kernel and variant, or the reason for the host's attention.
        config_sources: calls by where their launch config came from.
        peak_memory_bytes: most memory that torch held during the step; `None` on a CPU.
    """

    name: str
    time: Timing | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    attention_calls: int
    kernel_calls: int
    linear_calls: dict[str, int]
    ran: dict[str, int]
    config_sources: dict[str, int]
    peak_memory_bytes: int | None

    @property
    def emulated(self) -> bool:
        """Whether a kernel was emulated, so that its time says nothing."""
        return any("emulation" in label for label in (*self.ran, *self.linear_calls))


@dataclass(frozen=True, slots=True)
class StepTimes(JsonRecord):
    """The steps of one measurement.

    Attributes:
        rows: the unpatched step first, then one row a kernel.
        aa_ratio: the unpatched step timed twice: one median over the other.
        stamp: `clean`, `noisy` or `throttled`.
    """

    rows: tuple[StepTime, ...]
    aa_ratio: float
    stamp: str


def time_steps(
    model: nn.Module,
    arguments: Mapping[str, Any],
    kernels: Sequence[str],
    *,
    min_seq: int,
    budget_s: float | None = None,
    compiled: bool = False,
    config_dir: str | None = None,
) -> StepTimes:
    """Time a denoiser unpatched, and patched with each kernel.

    Every kernel gets a copy of the modules, so nothing is patched or unpatched between two timed
    calls. A copy shares the weights, unless its linears are patched: those leave the device.
    Emulated kernels run once, untimed.

    Args:
        model: the denoiser, unpatched.
        arguments: keyword arguments of its forward.
        kernels: kernels as `patch` takes them; `auto+fp8_row` has the linears on `fp8_row` too;
            or names of `PEERS`.
        min_seq: as `patch` takes it.
        budget_s: seconds that timing may take, `None` for those of `BUDGET_S`.
        compiled: time each of them with its blocks compiled too.
        config_dir: folder of configs; each kernel of ours is timed with them too.

    Raises:
        DeviceError: a step ran out of memory or made NaN.
    """
    device = next(model.parameters()).device
    steps: dict[str, Callable[[], object]] = {}
    rows: dict[str, StepTime] = {}
    tuned = [name + TUNED for name in kernels if config_dir and name not in PEERS]
    for name in (UNPATCHED, *dict.fromkeys(kernels), *tuned):
        # Patching with `sdpa` changes no bit; it counts the calls of the unpatched step.
        asked = "sdpa" if name == UNPATCHED else name.removesuffix(TUNED)
        configs = config_dir if name.endswith(TUNED) else None
        twin, handle = _patched_copy(model, asked, min_seq, configs)
        rows[name] = _counted(name, twin, arguments, handle)
        if name == UNPATCHED:
            handle.unpatch()
        if not rows[name].emulated:
            steps[name] = _step(twin, arguments)
        if compiled:
            name += COMPILED
            faster = sharing_copy(model)
            if asked in PEERS:
                faster = copy.deepcopy(model)
                PEERS[asked](faster)
            elif asked != "sdpa":
                faster, _ = _patched_copy(model, asked, min_seq, configs)
            compile_blocks(faster)
            steps[name] = _step(faster, arguments)
            rows[name] = replace(
                rows[name.removesuffix(COMPILED)],
                name=name,
                peak_memory_bytes=_warmed_up(name, steps[name], device),
            )
    before = snapshot(device)
    budget_s = budget_s or BUDGET_S[device.type]
    steps[AGAIN] = steps[UNPATCHED]
    timed = measure(steps, device=device, min_samples=10, budget_s=budget_s)
    aa_ratio = timed[AGAIN].timing().median_ms / timed[UNPATCHED].timing().median_ms
    result = tuple(_with_time(row, timed) for row in rows.values())
    return StepTimes(result, aa_ratio, stamp(aa_ratio, before, snapshot(device)))


def _patched_copy(
    model: nn.Module, asked: str, min_seq: int, config_dir: str | None
) -> tuple[nn.Module, PatchHandle]:
    """A copy on what was asked for, and a handle that counts its calls."""
    if asked in PEERS:
        twin = copy.deepcopy(model)
        handle = sage_plugin.patch(twin, kernel="sdpa", min_seq=min_seq)
        handle.unpatch()
        PEERS[asked](twin)
        return twin, handle
    kernel, _, linears = asked.partition("+")
    twin = copy.deepcopy(model) if linears else sharing_copy(model)
    options = {"linears": linears, "keep_originals": False} if linears else {}
    return twin, sage_plugin.patch(
        twin, kernel=kernel, min_seq=min_seq, config_dir=config_dir, **options
    )


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares parameters and buffers."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks that a model repeats, each by itself, in place.

    Example:
        >>> compile_blocks(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    """
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList) and len({type(block) for block in blocks}) == 1:
            for block in blocks:
                if any(True for _ in block.parameters()) and "Block" in type(block).__name__:
                    block.compile(fullgraph=True)


def _warmed_up(name: str, step: Callable[[], object], device: torch.device) -> int | None:
    """Run a compiled step twice; most memory that torch held in the second.

    Raises:
        DeviceError: it ran out of memory.
    """
    try:
        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step()
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"a step on {name} does not fit into the memory of {device}") from error
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _step(model: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    def run() -> Any:  # noqa: ANN401
        with torch.no_grad():
            return model(**arguments)

    return run


def _counted(
    name: str, model: nn.Module, arguments: Mapping[str, Any], handle: PatchHandle
) -> StepTime:
    """One untimed step: what its attention calls ran on, and the memory that it needs."""
    device = next(model.parameters()).device
    gpu = device.type == "cuda"
    run = _step(model, arguments)
    try:
        if gpu:
            run()  # compiles, so that the next one shows the step alone
            torch.cuda.reset_peak_memory_stats(device)
        before, linears = _counts(handle.report()), _linear_calls(handle.report())
        out = run()
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"a step on {name} does not fit into the memory of {device}") from error
    ran, sources = (new - old for new, old in zip(_counts(handle.report()), before, strict=True))
    if not bool(torch.isfinite(out[0]).all()):
        raise DeviceError(f"a step on {name} made NaN or Inf")
    on_host = sum(n for label, n in ran.items() if label.startswith("host: "))
    return StepTime(
        name=name,
        time=None,
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        attention_calls=ran.total(),
        kernel_calls=ran.total() - on_host - ran["sdpa:host"],
        linear_calls=dict(_linear_calls(handle.report()) - linears),
        ran=dict(ran),
        config_sources=dict(sources),
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if gpu else None,
    )


def _counts(report: PluginReport) -> tuple[Counter[str], Counter[str]]:
    """Calls by what they ran on, and by where their launch config came from."""
    ran: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for row in report.rows:
        ran.update(row.calls)
        ran.update({f"host: {reason}": count for reason, count in row.fallbacks.items()})
        sources.update(row.config_sources)
    return ran, sources


def _linear_calls(report: PluginReport) -> Counter[str]:
    calls: Counter[str] = Counter()
    for row in report.linears:
        calls.update(row.calls)
    return calls


def _with_time(row: StepTime, timed: Mapping[str, Samples]) -> StepTime:
    """The row with its time, and its ratio to the unpatched step from paired samples."""
    samples = timed.get(row.name)
    if samples is None:
        return row
    base = UNPATCHED + COMPILED if row.name.endswith(COMPILED) else UNPATCHED
    if row.name == base:
        return replace(row, time=samples.timing())
    ratio, low, high = samples.speedup_over(timed[base])
    return replace(row, time=samples.timing(), ratio=ratio, ratio_low=low, ratio_high=high)


def time_cells(row: StepTime) -> tuple[str, str]:
    """Time of the step and its ratio to the unpatched one, as text."""
    if row.time is None:
        return NO_SPEED, "-"
    digits = 1 if row.time.median_ms >= 10 else 3
    half = (row.time.high_ms - row.time.low_ms) / 2
    time = f"{row.time.median_ms:.{digits}f} ms ± {half:.{digits}f}"
    if row.ratio is None:
        return time, "1"
    return time, f"{row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f})"
