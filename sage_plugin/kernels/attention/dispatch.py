"""The decision table: which kernel and variant a call runs on, or why the host's attention does.

Everything here is known without data: shapes, dtypes, device. Nothing queries a device;
`device.facts_of` is the one place where a tensor's device becomes facts.
"""

from __future__ import annotations

from sage_plugin import settings
from sage_plugin.device import facts_of
from sage_plugin.errors import UnknownKernelError, did_you_mean
from sage_plugin.kernels.attention.launch_space import (
    candidates,
    default_launch,
    find_launch,
    illegal_reason,
    tune_command,
)
from sage_plugin.kernels.contract import HOST, Decision, ResolvedConfig
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.launch_config import forget
from sage_plugin.kernels.support import (
    TRITON_KERNELS,
    device_reason,
    fewest_operations,
    fewest_tokens,
    gpu_variant,
    hopper_reason,
    kernels_of,
    most_channels,
)
from sage_plugin.schema import (
    KERNEL_ALIASES,
    KERNELS,
    VARIANTS,
    CallKey,
    CallShape,
    DeviceFacts,
)

__all__ = [
    "Decision",
    "ResolvedConfig",
    "automatic_kernel",
    "call_key",
    "candidates",
    "decide",
    "default_launch",
    "facts_of",
    "find_launch",
    "forget",
    "illegal_reason",
    "kernels_of",
    "parse_kernel",
    "resolve_kernel",
    "tune_command",
]

DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 256

ON_CPU = FallbackReason(Fallback.CPU)
DENSE_ADDITIVE_MASK = FallbackReason(Fallback.DENSE_ADDITIVE_MASK)
"""Why `auto` leaves them: at head dim 128 SDPA took three quarters of the time on an H100. A bool
mask of rows and keys is faster here, whatever it hides."""
TOO_SMALL = FallbackReason(Fallback.TOO_SMALL)
"""Why `auto` leaves calls of fewer operations than `support.fewest_operations`, or of fewer tokens
than `support.fewest_tokens`."""
GRADIENT = FallbackReason(Fallback.GRADIENT)
DROPOUT = FallbackReason(Fallback.DROPOUT)
EMPTY = FallbackReason(Fallback.EMPTY)


def resolve_kernel(name: str) -> str:
    """Return the canonical name of a kernel, `"auto"` included."""
    known = KERNEL_ALIASES.get(name, name)
    if known != "auto" and known not in KERNELS:
        raise UnknownKernelError(_unknown(name))
    return known


def _unknown(name: str) -> str:
    """Say that there is no such kernel, and which one was meant."""
    kernel, colon, variant = name.partition(":")
    if colon and KERNEL_ALIASES.get(kernel, kernel) in KERNELS:
        _checked_variant(KERNEL_ALIASES.get(kernel, kernel), variant)
        return f"kernel {name!r} has a variant in it: give kernel={kernel!r}, variant={variant!r}"
    return (
        f"kernel {name!r} is not known; choose one of auto, {', '.join(KERNELS)} "
        f"(alias {', '.join(f'{a} = {k}' for a, k in KERNEL_ALIASES.items())})"
        f"{did_you_mean(name, ('auto', *KERNELS, *KERNEL_ALIASES))}"
    )


def parse_kernel(text: str) -> tuple[str, str]:
    """Split `kernel` or `kernel:variant` into names that exist, the variant by default `"auto"`."""
    name, _, variant = text.partition(":")
    kernel = resolve_kernel(name)
    return kernel, _checked_variant(kernel, variant or "auto")


def environment_choice() -> tuple[str, str]:
    """What the environment puts in place of `kernel="auto"` and `variant="auto"`."""
    now = settings.current()
    return now.kernel or "auto", now.variant or "auto"


def automatic_kernel(facts: DeviceFacts) -> str:
    """Return the kernel that `auto` stands for on a device, where it takes a call at all."""
    return "sage" if facts.fp8_dtype is None else "fav3_sage"


# What `torch.compiler.assume_constant_result` does, without its import of the whole compiler.
vars(environment_choice)["_dynamo_marked_constant"] = True


def decide(
    shape: CallShape,
    facts: DeviceFacts,
    *,
    kernel: str = "auto",
    variant: str = "auto",
    min_seq: int = 0,
    dropout: float = 0.0,
    needs_grad: bool = False,
    special: bool = False,
    additive: bool = False,
) -> Decision:
    """Which kernel and variant one attention call runs on.

    Args:
        shape: the call.
        facts: the device of its tensors.
        kernel: kernel name, alias or `"auto"`.
        variant: variant name or `"auto"`.
        min_seq: calls whose shorter side is under it go to the host's attention.
        dropout: its dropout probability.
        needs_grad: whether a gradient has to flow through it.
        special: whether it has a window, a cap, sinks, packed sequences or a bias of each head,
            which the portable variants take.
        additive: whether its mask, if any, is added to the scores.

    Returns:
        The decision; with a reason where the host's attention takes the call.

    Raises:
        UnknownKernelError: the kernel or the variant is not known.
    """
    env_kernel, env_variant = environment_choice()
    kernel = resolve_kernel(env_kernel if kernel == "auto" else kernel)
    if variant == "auto" and kernel not in ("torch", "sdpa"):
        variant = env_variant
    automatic = kernel == "auto"
    if automatic:
        if facts.kind == "cpu" and variant == "auto":
            return _host(ON_CPU)
        kernel = automatic_kernel(facts)
    variant = _checked_variant(kernel, variant)
    if kernel == "sdpa":
        return Decision(kernel, HOST)
    reason = _call_reason(kernel, shape, min_seq, dropout, needs_grad)
    if variant != "emulation":
        reason = reason or device_reason(kernel, facts)
        if automatic:
            reason = reason or _left_by_auto(shape, facts, additive, special)
        if reason is None and kernel != "torch":
            reason, variant = _gpu_variant(kernel, variant, shape, facts, special)
    if reason is not None:
        return _host(reason)
    if kernel == "torch":
        return Decision(kernel, HOST)
    return Decision(kernel, "emulation" if variant == "auto" else variant)


def _gpu_variant(
    kernel: str, variant: str, shape: CallShape, facts: DeviceFacts, special: bool
) -> tuple[FallbackReason | None, str]:
    """The variant that takes a call, or the one asked for and why it cannot."""
    if variant == "portable" or (variant == "auto" and facts.kind == "cpu"):
        return None, variant
    reason = hopper_reason(
        kernel, facts, shape.head_dim, mask_kind=shape.mask_kind, special=special
    )
    if variant == "auto":
        return None, gpu_variant(kernel, shape.head_dim, reason, mask_kind=shape.mask_kind)
    return reason, variant


def call_key(shape: CallShape, decision: Decision) -> CallKey:
    """The call key under which a call's launch config is looked up."""
    return CallKey(
        kernel=decision.kernel,
        variant=decision.variant,
        head_dim=shape.head_dim,
        dv=shape.dv,
        dtype=shape.dtype,
        gqa_ratio=shape.heads_q // shape.heads_k,
        causal=shape.causal,
        mask_kind=shape.mask_kind,
        layout=shape.layout,
        seq_q=shape.seq_q,
        seq_k=shape.seq_k,
        batch_heads=shape.batch * shape.heads_q,
    )


def _left_by_auto(
    shape: CallShape, facts: DeviceFacts, additive: bool, special: bool
) -> FallbackReason | None:
    """Why `auto` leaves a call that a kernel could take to the host's attention, or `None`."""
    if additive and shape.mask_kind == "dense":
        return DENSE_ADDITIVE_MASK
    if min(shape.seq_q, shape.seq_k) < fewest_tokens(facts.arch, causal=shape.causal):
        return TOO_SMALL
    if _operations(shape) < fewest_operations(facts.arch, shape.head_dim):
        return TOO_SMALL
    widest = most_channels(facts.arch)
    if widest is not None and shape.head_dim > widest and not special:
        return FallbackReason(Fallback.WIDE_HEADS, widest)
    return None


def _operations(shape: CallShape) -> float:
    """Operations of both products, of all pairs or, in a causal call, of half of them."""
    pairs = shape.seq_q * shape.seq_k * (0.5 if shape.causal else 1.0)
    return 4.0 * shape.batch * shape.heads_q * pairs * shape.head_dim


def _host(reason: FallbackReason) -> Decision:
    return Decision("sdpa", HOST, reason)


def _checked_variant(kernel: str, variant: str) -> str:
    if variant == "auto" or (variant == HOST and kernel in ("torch", "sdpa")):
        return "auto" if kernel not in ("torch", "sdpa") else HOST
    built = TRITON_KERNELS.get(kernel, (HOST,)) if kernel != "auto" else VARIANTS
    if variant not in built:
        what = "not built in this version" if variant in VARIANTS else "not known"
        raise UnknownKernelError(
            f"variant {variant!r} of kernel {kernel!r} is {what}; "
            f"choose one of auto, {', '.join(built)}{did_you_mean(variant, built)}"
        )
    return variant


def _call_reason(
    kernel: str, shape: CallShape, min_seq: int, dropout: float, needs_grad: bool
) -> FallbackReason | None:
    """Why a kernel does not take this call on any hardware, or `None`."""
    if needs_grad:
        return GRADIENT
    if dropout > 0.0:
        return DROPOUT
    if kernel != "torch" and shape.dtype not in DTYPES:
        return FallbackReason(Fallback.DTYPE, shape.dtype)
    if kernel != "torch" and shape.head_dim > MAX_HEAD_DIM:
        return FallbackReason(Fallback.HEAD_DIM, (shape.head_dim, MAX_HEAD_DIM))
    if kernel != "torch" and shape.dv != shape.head_dim:
        return FallbackReason(Fallback.V_CHANNELS, (shape.dv, shape.head_dim))
    if 0 in (shape.batch, shape.heads_q, shape.seq_q, shape.seq_k, shape.head_dim):
        return EMPTY
    if shape.seq_q < min_seq or shape.seq_k < min_seq:
        return FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, min_seq)
    return None
