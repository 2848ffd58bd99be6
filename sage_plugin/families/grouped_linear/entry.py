"""The entry of grouped linears: what tools may ask."""

from __future__ import annotations

import functools

import torch

from sage_plugin.families.family import Family
from sage_plugin.families.grouped_linear import ahead_of_time, replay
from sage_plugin.families.linear import cost, gates, labels
from sage_plugin.families.linear.entry import (
    TUNED,
    call_key,
    parse_linear_kernel,
    refuse_untuned_linear,
    shape_of,
)
from sage_plugin.families.linear.replay import saved_shape
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.grouped_linear import dispatch, launch_space
from sage_plugin.kernels.linear.dispatch import automatic_kernel
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.support import device_reason
from sage_plugin.schema import (
    GROUPED_LINEAR,
    GROUPED_LINEAR_KERNELS,
    LINEAR_BACKENDS,
    DeviceFacts,
    LinearShape,
)


def kernels_of(facts: DeviceFacts) -> tuple[str, ...]:
    """Return the kernels that a device can run, the 16-bit one first."""
    return tuple(k for k in GROUPED_LINEAR_KERNELS if device_reason(k, facts) is None)


def decide(
    shape: LinearShape, facts: DeviceFacts, *, kernel: str = "auto", variant: str = "auto"
) -> Decision:
    """Return kernel and backend of a call of a shape, or why torch's own product takes it."""
    with torch.device("meta"):
        call = ahead_of_time.empty_call(shape)
    return dispatch.decide(call, facts, BackendRequest(kernel, variant))


GROUPED_LINEAR_FAMILY = Family(
    name=GROUPED_LINEAR,
    parse_kernel=functools.partial(
        parse_linear_kernel, kernels=GROUPED_LINEAR_KERNELS, of_baseline=LINEAR_BACKENDS
    ),
    kernels_of=kernels_of,
    automatic_kernel=automatic_kernel,
    decide=decide,
    call_key=call_key,
    shape_of=shape_of,
    launches=launch_space.RULES,
    launch_all=ahead_of_time.launch_all,
    gate_for=gates.gate_for,
    captured=replay.captured,
    drawn=replay.drawn,
    saved_shape=saved_shape,
    refuse_untuned=functools.partial(refuse_untuned_linear, kernels_of),
    describe=labels.describe,
    describe_key=labels.describe_key,
    lines=labels.lines,
    flops=cost.flops,
    weight_values=cost.weight_values,
    tuned=TUNED,
)
