"""The entry of linears: what tools may ask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from sage_plugin.errors import DeviceError, UsageError, check_name
from sage_plugin.families.family import Family
from sage_plugin.families.linear import ahead_of_time, cost, gates, labels, replay
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.linear import dispatch, launch_space
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.support import device_reason
from sage_plugin.schema import (
    LINEAR,
    LINEAR_BACKENDS,
    LINEAR_KERNELS,
    DeviceFacts,
    LinearKey,
    LinearShape,
)

TUNED = "triton"
"""The backend whose launch configs are tuned."""


def parse_linear_kernel(
    text: str, *, kernels: Sequence[str], of_baseline: Sequence[str]
) -> tuple[str, str]:
    """Split `kernel` or `kernel:backend` into names that exist; the backend defaults to `"auto"`.

    Args:
        text: what was given.
        kernels: names of kernels, the 16-bit one first.
        of_baseline: backends of that one beside torch's own, `"host"`.

    Raises:
        UnknownKernelError: the kernel or its backend is not known.
    """
    kernel, _, backend = text.partition(":")
    backend = backend or "auto"
    check_name("kernel", kernel, kernels)
    own = (HOST, *of_baseline) if kernel == dispatch.BASELINE else LINEAR_BACKENDS
    check_name("backend", backend, own, f" of kernel {kernel!r}")
    return kernel, "auto" if backend == HOST else backend


def parse_kernel(text: str) -> tuple[str, str]:
    """Split `kernel` or `kernel:backend` as `parse_linear_kernel` does.

    Raises:
        UnknownKernelError: the kernel or its backend is not known.

    Example:
        >>> parse_kernel("fp8_row:torch")
        ('fp8_row', 'torch')
    """
    return parse_linear_kernel(text, kernels=LINEAR_KERNELS, of_baseline=())


def kernels_of(facts: DeviceFacts) -> tuple[str, ...]:
    """Return the kernels that a device can run, torch's own first."""
    return tuple(k for k in LINEAR_KERNELS if device_reason(k, facts) is None)


def decide(
    shape: LinearShape, facts: DeviceFacts, *, kernel: str = "auto", variant: str = "auto"
) -> Decision:
    """Return kernel and backend of a call of a shape, or why torch's own linear takes it."""
    with torch.device("meta"):
        call = ahead_of_time.empty_call(shape)
    return dispatch.decide(call, facts, BackendRequest(kernel, variant))


def call_key(shape: LinearShape, decision: Decision) -> LinearKey:
    """Return the key of a call."""
    return LinearKey(
        decision.kernel, decision.variant, shape.in_features, shape.out_features, shape.dtype,
        shape.rows, shape.groups,
    )  # fmt: skip


def shape_of(key: LinearKey) -> LinearShape:
    """Return a call that has a key, without a bias."""
    return LinearShape(key.rows, key.in_features, key.out_features, key.dtype, groups=key.groups)


def refuse_untuned_linear(
    kernels: Callable[[DeviceFacts], Sequence[str]],
    text: str,
    decision: Decision,
    facts: DeviceFacts,
) -> None:
    """Refuse what has no launch config.

    Raises:
        DeviceError: the device is a CPU, whose emulation has none.
        UsageError: torch multiplies.
    """
    if facts.kind == "cpu":
        raise DeviceError(
            "linears are tuned on a GPU only: their emulation has no launch config; run this where "
            "there is a GPU"
        )
    if decision.reason is None and decision.variant != TUNED:
        ours = [name for name in kernels(facts) if name != dispatch.BASELINE]
        raise UsageError(
            f"kernel {text!r} is {decision.label} on {facts.name}, torch's own product, which has "
            f"no launch config: name one of {', '.join(f'{name}:{TUNED}' for name in ours)}"
        )


LINEAR_FAMILY = Family(
    name=LINEAR,
    parse_kernel=parse_kernel,
    kernels_of=kernels_of,
    automatic_kernel=dispatch.automatic_kernel,
    decide=decide,
    call_key=call_key,
    shape_of=shape_of,
    launches=launch_space.RULES,
    launch_all=ahead_of_time.launch_all,
    gate_for=gates.gate_for,
    captured=replay.captured,
    drawn=replay.drawn,
    saved_shape=replay.saved_shape,
    refuse_untuned=functools.partial(refuse_untuned_linear, kernels_of),
    describe=labels.describe,
    describe_key=labels.describe_key,
    lines=labels.lines,
    flops=cost.flops,
    weight_values=cost.weight_values,
    tuned=TUNED,
)
