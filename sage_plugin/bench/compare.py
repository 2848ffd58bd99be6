"""Run every kernel on one input: one accuracy check each, then one interleaved timing of all.

The first kernel is timed twice, as two candidates: how far it differs from itself is the stamp.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from sage_plugin import device as devices
from sage_plugin.accuracy.gate import failures
from sage_plugin.accuracy.metrics import errors_of
from sage_plugin.accuracy.output import CheckedOutput, ExactRows
from sage_plugin.bench.difference import difference
from sage_plugin.bench.rows import EMULATION_NOTE, KernelRow, Table
from sage_plugin.errors import SageError, UnsupportedInputError
from sage_plugin.families import Family
from sage_plugin.families.family import ReplayCall, SplitCall
from sage_plugin.kernels.contract import HOST, Decision, ResolvedConfig
from sage_plugin.measure.clocks import snapshot, stamp
from sage_plugin.measure.timing import Samples, TimingLimits, measure
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import AnyShape, DeviceFacts, ErrorMetrics

logger = logging.getLogger(__name__)

AGAIN = "again"
ALONE = "alone"
GPU_LIMITS = TimingLimits()
CPU_LIMITS = TimingLimits(warmup=1, warmup_s=0.0, min_samples=5, max_samples=50, budget_s=3.0)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """How to compare, the same for every input.

    Attributes:
        kernels: kernel and variant names, the variant may be `"auto"`.
        reference: the kernel to compare with, `None` for none.
        method: timing method, `None` for the device's default.
        config_dir: folder of configs searched first.
        seed: of the order of timing.
        differences: also take plain statistics against the reference, or the oracle without one.
    """

    kernels: tuple[tuple[str, str], ...]
    reference: tuple[str, str] | None = None
    method: str | None = None
    config_dir: str | None = None
    seed: int = 0
    differences: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that can run an input.

    Attributes:
        decision: kernel and variant.
        found: the launch config, `None` if nothing is tuned.
        checked: rows of its output, before the last rounding.
        errors: of those rows against the exact ones.
        timed: the timed call in its two parts.
    """

    decision: Decision
    found: ResolvedConfig | None
    checked: CheckedOutput
    errors: ErrorMetrics
    timed: SplitCall

    @property
    def label(self) -> str:
        """`kernel:variant`."""
        return self.decision.label


def limits_for(device: torch.device) -> TimingLimits:
    """When the timing of one input ends on this device."""
    return CPU_LIMITS if device.type == "cpu" else GPU_LIMITS


def run_case(case: ReplayInputs, plan: BenchPlan, *, device: torch.device) -> Table:
    """Judge and time every kernel of the plan on one input.

    A kernel that cannot run the input, or fails on it, becomes a sentence in `Table.failed`; the
    others go on.

    Args:
        case: the input.
        plan: kernels and options.
        device: where to run.

    Raises:
        UnsupportedInputError: no kernel of the plan runs this input on this device, or its memory
            does not hold it.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            return _table(case, plan, device)
        except torch.OutOfMemoryError as error:
            raise UnsupportedInputError(
                f"{case.name}: {device} has not enough memory for this input"
            ) from error


def _table(case: ReplayInputs, plan: BenchPlan, device: torch.device) -> Table:
    """`run_case` while the device is the current one, as launches outside of our op need it."""
    facts = devices.facts(device)
    judged = case.load(device)
    timed = case.timed(judged, device)
    shape = timed.shape
    exact = judged.exact()
    ready, base, failed = _candidates(case.family, plan, judged, timed, exact, facts)
    if not ready:
        raise UnsupportedInputError(f"{case.name}: no kernel could run it: {'; '.join(failed)}")
    before = snapshot(device)
    samples = _timed(ready, plan, device)
    after = snapshot(device)
    first = ready[0].label
    aa_ratio = median(samples[first].ms) / median(samples[f"{first} {AGAIN}"].ms)
    trust = stamp(aa_ratio, before, after)
    operations = timed.flops()
    rows = tuple(
        _row(case, shape, operations, one, base, samples, exact, trust, plan) for one in ready
    )
    return Table(
        input=case.name,
        shape=shape,
        rows=rows,
        stamp=trust,
        aa_ratio=aa_ratio,
        before=before,
        after=after,
        failed=tuple(failed),
    )


def _candidates(
    family: Family,
    plan: BenchPlan,
    judged: ReplayCall,
    timed: ReplayCall,
    exact: ExactRows,
    facts: DeviceFacts,
) -> tuple[list[Candidate], Candidate | None, list[str]]:
    """The kernels that run, the reference first and by itself too, and why the others do not."""
    wanted = plan.kernels if plan.reference is None else (plan.reference, *plan.kernels)
    ready: dict[str, Candidate] = {}
    labels: dict[tuple[str, str] | None, str] = {}
    failed = []
    for kernel, variant in wanted:
        decision = family.decide(timed.shape, facts, kernel=kernel, variant=variant)
        name = kernel if variant == "auto" else f"{kernel}:{variant}"
        labels[kernel, variant] = decision.label
        if decision.reason is not None:
            failed.append(f"{name} cannot run this call: {decision.reason}")
        elif decision.label not in ready:
            try:
                ready[decision.label] = _candidate(
                    family, decision, judged, timed, exact, facts, config_dir=plan.config_dir
                )
            except SageError as error:
                failed.append(str(error))
            except Exception as error:  # one kernel's compiler or memory must not end the table
                logger.debug("%s failed", decision.label, exc_info=True)
                first_line = (str(error).strip().splitlines() or ["no message"])[0]
                failed.append(f"{name} failed: {type(error).__name__}: {first_line}")
    return list(ready.values()), ready.get(labels.get(plan.reference, "")), failed


def _candidate(
    family: Family,
    decision: Decision,
    judged: ReplayCall,
    timed: ReplayCall,
    exact: ExactRows,
    facts: DeviceFacts,
    *,
    config_dir: str | None = None,
) -> Candidate:
    """Judge one run of a kernel and prepare its timed calls, all with one launch config."""
    found = None
    if decision.variant != HOST:
        key = family.call_key(timed.shape, decision)
        found = family.find_launch(key, facts, config_dir=config_dir)
    config = None if found is None else found.config
    checked = judged.checked(decision, config, exact)
    split = timed.split(decision, config, facts)
    if timed is not judged:  # what cannot run at the full size shows here
        split.alone()
    errors = errors_of(checked, exact, dtype=judged.dtype)
    return Candidate(decision, found, checked, errors, split)


def _timed(ready: list[Candidate], plan: BenchPlan, device: torch.device) -> dict[str, Samples]:
    """One interleaved measurement of all calls, with quantisation and alone, and the self-test."""
    functions: dict[str, Callable[[], object]] = {}
    for one in ready:
        functions[one.label] = one.timed.whole
        if one.timed.quantizes:
            functions[f"{one.label} {ALONE}"] = one.timed.alone
    functions[f"{ready[0].label} {AGAIN}"] = ready[0].timed.whole
    return measure(
        functions,
        device=device,
        method=plan.method,
        limits=limits_for(device),
        seed=plan.seed,
    )


def _row(
    case: ReplayInputs,
    shape: AnyShape,
    operations: int,
    one: Candidate,
    base: Candidate | None,
    samples: dict[str, Samples],
    exact: ExactRows,
    trust: str,
    plan: BenchPlan,
) -> KernelRow:
    rows = exact if base is None else dataclasses.replace(exact, out=base.checked.out)
    dtype = getattr(torch, shape.dtype)
    alone = samples.get(f"{one.label} {ALONE}")
    low = center = high = None
    if base is not None and base is not one:
        center, low, high = samples[one.label].speedup_over(samples[base.label])
    found = one.found
    return KernelRow(
        input=case.name,
        source=case.source,
        input_sha256=case.sha256,
        shape=shape,
        kernel=one.decision.kernel,
        variant=one.decision.variant,
        config=None if found is None else found.config,
        config_source="" if found is None else found.source,
        time=samples[one.label].timing(),
        kernel_time=None if alone is None else alone.timing(),
        flops=operations,
        moved_bytes=one.timed.moved_bytes,
        errors=one.errors,
        reference="" if base is None else base.label,
        reference_errors=None if base is None else errors_of(one.checked, rows, dtype=dtype),
        speedup=center,
        speedup_low=low,
        speedup_high=high,
        gate=tuple(failures(case.family.gate_for(one.decision.kernel), one.errors)),
        stamp=trust,
        note=EMULATION_NOTE if one.decision.variant == "emulation" else "",
        difference=difference(one.checked.out, rows.out) if plan.differences else None,
    )
