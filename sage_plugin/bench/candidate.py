"""A kernel on one input: its config looked up, one run judged, its timed calls prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.metrics import compare
from sage_plugin.accuracy.output import CheckedOutput, checked_output
from sage_plugin.accuracy.reference import Reference
from sage_plugin.bench.cost import is_quantized, moved_bytes
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import (
    HOST,
    AttentionParams,
    Decision,
    Implementation,
    Prepared,
    ResolvedConfig,
    bhsd,
)
from sage_plugin.replay.call import ReplayCall
from sage_plugin.schema import DeviceFacts, ErrorMetrics


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that can run an input.

    Attributes:
        decision: kernel and variant.
        found: the launch config, `None` where nothing is tuned.
        checked: rows of its output, before the last rounding.
        errors: of those rows against the oracle.
        call: the timed call, with quantisation.
        alone: the attention launch alone; `None` where nothing is quantised.
        moved_bytes: bytes that the attention launch must move.
    """

    decision: Decision
    found: ResolvedConfig | None
    checked: CheckedOutput
    errors: ErrorMetrics
    call: Callable[[], object]
    alone: Callable[[], object] | None
    moved_bytes: int

    @property
    def label(self) -> str:
        """`kernel:variant`."""
        return self.decision.label


def candidate(
    decision: Decision,
    judged: ReplayCall,
    timed: ReplayCall,
    exact: Reference,
    facts: DeviceFacts,
    *,
    config_dir: str | None = None,
) -> Candidate:
    """Judge one run of a kernel and prepare its timed calls, all with one launch config.

    Args:
        decision: kernel and variant.
        judged: the call on which the error is taken.
        timed: the call that is timed.
        exact: the oracle's rows of the judged one.
        facts: the device.
        config_dir: folder of configs searched first.
    """
    shape, found = timed.shape, None
    if decision.variant != HOST:
        key = dispatch.call_key(shape, decision)
        found = dispatch.find_launch(key, facts, config_dir=config_dir)
    config = None if found is None else found.config
    checked = checked_output(
        decision.kernel,
        decision.variant,
        config,
        *judged.tensors,
        causal=shape.causal,
        scale=shape.scale,
        exact=exact,
        mask=judged.mask,
    )
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    built = implementation(decision.kernel, decision.variant, fp8)
    problem = AttentionParams(shape.scale, shape.causal, shape.layout, timed.mask, lse=False)
    tensors = (bhsd(tensor, shape.layout) for tensor in timed.tensors)  # its own inverse
    prepare = functools.partial(built.prepare, *tensors, problem=problem, launch=config)
    operands = prepare()
    if timed is not judged:  # what cannot run at the full size shows here
        built.launch(operands)
    return Candidate(
        decision=decision,
        found=found,
        checked=checked,
        errors=errors_against(checked, exact.out, exact, dtype=judged.tensors[2].dtype),
        call=functools.partial(_whole, built, prepare),
        alone=functools.partial(built.launch, operands) if is_quantized(operands) else None,
        moved_bytes=moved_bytes(operands, shape),
    )


def _whole(built: Implementation[Prepared], prepare: Callable[[], Prepared]) -> object:
    return built.launch(prepare())


def errors_against(
    checked: CheckedOutput, other: torch.Tensor, exact: Reference, *, dtype: torch.dtype
) -> ErrorMetrics:
    """Metrics of a checked output against the oracle's rows, or another kernel's."""
    return compare(
        checked.out,
        other,
        v_mean=exact.v_mean,
        rounding=dtype,
        bad_values=checked.bad_values,
        suspect=checked.suspect,
    )
