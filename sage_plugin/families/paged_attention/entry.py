"""The entry of paged attention: what tools may ask."""

from __future__ import annotations

from sage_plugin.errors import DeviceError, UnknownKernelError, UsageError
from sage_plugin.families.family import Family
from sage_plugin.families.paged_attention import ahead_of_time, cost, gates, labels, replay
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.paged_attention import dispatch, launch_space
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.support import device_reason
from sage_plugin.paged_records import PAGED_ATTENTION, PAGED_KERNELS, PagedKey, PagedShape
from sage_plugin.schema import DeviceFacts

BASELINE = "sdpa"
"""Torch's attention on gathered keys and values."""

TUNED = "triton"
"""The backend whose launch configs are tuned."""


def parse_kernel(text: str) -> tuple[str, str]:
    """Split `kernel` or `kernel:backend` into names that exist; the backend defaults to `"auto"`.

    Raises:
        UnknownKernelError: the kernel or its backend is not known.

    Example:
        >>> parse_kernel("qk_int8:triton")
        ('qk_int8', 'triton')
    """
    if text in (BASELINE, f"{BASELINE}:{HOST}"):
        return BASELINE, "auto"
    try:
        return dispatch.parse_kernel(text)
    except UnknownKernelError as error:
        raise UnknownKernelError(f"{error}, or {BASELINE} to compare with") from None


def kernels_of(facts: DeviceFacts) -> tuple[str, ...]:
    """Return the kernels that run any cache on a device, torch's own first.

    Those that quantize queries go with a cache and are named by who has it.
    """
    return tuple(k for k in (BASELINE, "fav2") if device_reason(k, facts) is None)


def automatic_kernel(facts: DeviceFacts) -> str:
    """Return the kernel that `auto` stands for."""
    return "fav2"


def decide(
    shape: PagedShape, facts: DeviceFacts, *, kernel: str = "auto", variant: str = "auto"
) -> Decision:
    """Return kernel and backend of a call of a shape.

    Raises:
        UnsupportedInputError: the kernel does not read such a cache, or the device cannot run it.
    """
    if kernel == BASELINE:
        return Decision(BASELINE, HOST)
    return dispatch.decide(ahead_of_time.empty_call(shape), facts, BackendRequest(kernel, variant))


def call_key(shape: PagedShape, decision: Decision) -> PagedKey:
    """Return the key of a call."""
    return PagedKey(
        decision.kernel, decision.variant, shape.kind, shape.head_dim,
        shape.heads_q // shape.heads_k, shape.dtype, shape.cache_dtype, shape.page_size,
        shape.tokens, shape.max_keys, len(shape.q_lens), shape.heads_k,
    )  # fmt: skip


def shape_of(key: PagedKey) -> PagedShape:
    """Return a call that has a key; its sequences are of one length, but for a prompt."""
    more = key.sequences - 1
    rows = (*(1,) * min(more, key.tokens), *(0,) * (more - key.tokens), max(0, key.tokens - more))
    return PagedShape(
        rows, (key.max_keys,) * key.sequences, key.heads_k * key.gqa_ratio, key.heads_k,
        key.head_dim, key.dtype, key.cache_dtype, key.page_size, key.max_keys,
    )  # fmt: skip


def refuse_untuned(text: str, decision: Decision, facts: DeviceFacts) -> None:
    """Refuse what has no launch config.

    Raises:
        DeviceError: the device is a CPU, whose emulation has none.
        UsageError: torch computes.
    """
    if facts.kind == "cpu":
        raise DeviceError(
            "paged attention is tuned on a GPU only: its emulation has no launch config; run this "
            "where there is a GPU"
        )
    if decision.variant != TUNED:
        raise UsageError(
            f"kernel {text!r} is {decision.label}, which has no launch config: name one of "
            f"{', '.join(PAGED_KERNELS)}"
        )


PAGED_FAMILY = Family(
    name=PAGED_ATTENTION,
    parse_kernel=parse_kernel,
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
    saved_shape=replay.saved_shape,
    refuse_untuned=refuse_untuned,
    describe=labels.describe,
    describe_key=labels.describe_key,
    lines=labels.lines,
    flops=cost.flops,
    tuned=TUNED,
)
