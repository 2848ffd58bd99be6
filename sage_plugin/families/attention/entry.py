"""Attention's entry."""

from __future__ import annotations

from sage_plugin.errors import UsageError
from sage_plugin.families.attention import ahead_of_time, cost, gates, replay
from sage_plugin.families.family import Family
from sage_plugin.kernels import call_words
from sage_plugin.kernels.attention import dispatch, launch_space
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.schema import ATTENTION as NAME
from sage_plugin.schema import KERNELS, CallKey, CallShape, DeviceFacts


def shape_of(key: CallKey) -> CallShape:
    """Return a call that has a key, with one batch item."""
    return CallShape(
        batch=1, heads_q=key.batch_heads, heads_k=key.batch_heads // key.gqa_ratio,
        seq_q=key.seq_q, seq_k=key.seq_k, head_dim=key.head_dim, dv=key.dv, dtype=key.dtype,
        causal=key.causal, mask_kind=key.mask_kind, layout=key.layout, scale=key.head_dim**-0.5,
    )  # fmt: skip


def refuse_gpu_variant(kernel: str, variant: str, facts: DeviceFacts) -> None:
    """Refuse a variant that is tuned on a GPU only, before anything runs on a CPU.

    Raises:
        UsageError: the device is a CPU and the variant is of a GPU.
    """
    if facts.kind == "cpu" and variant not in ("auto", HOST, "emulation"):
        raise UsageError(
            f"variant {variant!r} of kernel {kernel!r} needs a GPU: on a CPU leave the variant "
            f"out, or name {kernel}:emulation"
        )


def refuse_untuned(text: str, decision: Decision, facts: DeviceFacts) -> None:
    """Refuse what has no launch config, and what a CPU cannot tune.

    Raises:
        UsageError: torch's own attention, or a variant of a GPU on a CPU.
    """
    refuse_gpu_variant(decision.kernel, decision.variant, facts)
    if decision.variant == HOST and decision.reason is None:
        tuned = ", ".join(name for name in KERNELS if name not in ("torch", "sdpa"))
        raise UsageError(f"kernel {text!r} has no launch config: name one of {tuned}")


ATTENTION = Family(
    name=NAME,
    parse_kernel=dispatch.parse_kernel,
    kernels_of=dispatch.kernels_of,
    automatic_kernel=dispatch.automatic_kernel,
    decide=dispatch.decide,
    call_key=dispatch.call_key,
    shape_of=shape_of,
    launches=launch_space.RULES,
    launch_all=ahead_of_time.launch_all,
    gate_for=gates.gate_for,
    captured=replay.captured,
    drawn=replay.drawn,
    saved_shape=replay.saved_shape,
    refuse_untuned=refuse_untuned,
    describe=call_words.describe,
    describe_key=call_words.describe_key,
    lines=call_words.lines,
    flops=cost.flops,
)
