"""What attention refuses before anything runs: what was got, what is allowed, what to do."""

from __future__ import annotations

import math

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.launch_space import RULES
from sage_plugin.kernels.attention.mask import normalized
from sage_plugin.kernels.contract import NO_WINDOW, UNBOUNDED, Decision
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.resolver import check_launch, check_place
from sage_plugin.schema import LAYOUTS, CallShape, LaunchConfig

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Refuse Q, K and V that do not fit together, and unknown layouts."""
    given: tuple[object, ...] = (q, k, v)
    if not all(isinstance(x, torch.Tensor) for x in given):
        kinds = ", ".join(type(x).__name__ for x in given)
        raise UnsupportedInputError(
            f"q, k and v are {kinds}; each needs to be a torch.Tensor (torch.from_numpy makes one)"
        )
    if layout not in LAYOUTS:
        raise UnsupportedInputError(f"layout {layout!r} is not known; choose 'bhsd' or 'bshd'")
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if len(of_q) != 4 or len(of_k) != 4 or len(of_v) != 4:
        raise UnsupportedInputError(
            f"q, k and v have {len(of_q)}, {len(of_k)} and {len(of_v)} dimensions; "
            f"each needs 4 ({layout})"
        )
    fits = (
        of_q[0] == of_k[0] == of_v[0]
        and of_k[1] == of_v[1]
        and of_k[2] == of_v[2]
        and of_q[3] == of_k[3]
    )
    if not fits:
        raise UnsupportedInputError(
            f"q {tuple(of_q)}, k {tuple(of_k)} and v {tuple(of_v)} do not fit together in "
            f"layout {layout!r}: batch, key length, key heads and head dim must agree"
        )
    heads = 1 if layout == "bhsd" else 2
    check_heads(of_q[heads], of_k[heads])
    check_devices(q, k, v)


def check_heads(heads_q: int, heads_k: int) -> None:
    """Refuse query heads that do not form equal groups, one for each key head."""
    if heads_k == 0 or heads_q == 0 or heads_q % heads_k != 0:
        raise UnsupportedInputError(
            f"{heads_q} query heads do not divide into {heads_k} key heads; "
            "repeat K and V to a divisor of the query heads"
        )


def check_devices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse Q, K and V of several devices."""
    if not q.device == k.device == v.device:
        raise UnsupportedInputError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device"
        )


def check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse inputs that are not of a floating type that attention is computed in."""
    if q.dtype not in FLOATS or k.dtype not in FLOATS or v.dtype not in FLOATS:
        raise UnsupportedInputError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; each needs float16, bfloat16, "
            "float32 or, on the host's attention, float64"
        )


def check_out_dtype(out_dtype: torch.dtype | None) -> None:
    """Refuse an output that is not of a floating type."""
    if out_dtype is not None and out_dtype not in FLOATS:
        raise UnsupportedInputError(
            f"out_dtype {out_dtype} is not supported; choose float16, bfloat16 or float32"
        )


def checked_mask(
    attn_mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, layout: str
) -> torch.Tensor | None:
    """Return a mask in the form that kernels take, see `attention.mask`, or refuse it."""
    if attn_mask is None:
        return None
    if attn_mask.device != q.device:
        raise UnsupportedInputError(
            f"attn_mask is on {attn_mask.device} and q on {q.device}; move them to one device"
        )
    if attn_mask.dtype == q.dtype == torch.float64:  # the host's attention takes it as it is
        attn_mask = attn_mask.to(torch.float32)
    heads, seq = (1, 2) if layout == "bhsd" else (2, 1)
    of_q = q.shape
    return normalized(
        attn_mask, batch=of_q[0], heads_q=of_q[heads], seq_q=of_q[seq], seq_k=k.shape[seq]
    )


def checked_rest(
    q: torch.Tensor,
    layout: str,
    window: tuple[int, int] | None,
    softcap: float,
    scale: float | None,
    sinks: torch.Tensor | None,
) -> tuple[tuple[int, int], float, float]:
    """Return window, soft cap and scale as kernels take them; refuse what is wrong, sinks too."""
    sides, cap = checked_window(window), checked_softcap(softcap)
    if sinks is not None:
        check_sinks(sinks, q.shape[-3 if layout == "bhsd" else -2], q.device)
    return sides, cap, checked_scale(scale, q.shape[-1])


def checked_window(window: tuple[int, int] | None) -> tuple[int, int]:
    """Return the window of a call, `NO_WINDOW` for `None`."""
    if window is None:
        return NO_WINDOW
    sides = tuple(window) if isinstance(window, tuple | list) else ()
    if len(sides) != 2 or not all(
        isinstance(x, int) and not isinstance(x, bool) and x >= UNBOUNDED for x in sides
    ):
        raise UnsupportedInputError(
            f"window is {window!r}; it needs two integers of at least -1: the keys to the left and "
            "to the right that a query sees, -1 for all of them"
        )
    return (sides[0], sides[1])


def checked_softcap(softcap: float) -> float:
    """Return the soft cap of a call as a float, 0 for none."""
    if not isinstance(softcap, int | float) or not 0.0 <= softcap < math.inf:
        raise UnsupportedInputError(
            f"softcap is {softcap!r}; it needs a finite number above 0, or 0 for none"
        )
    return float(softcap)


def checked_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the scores, `1/sqrt(D)` for `None`."""
    if scale is None:
        return 1.0 / math.sqrt(max(1, head_dim))
    try:
        factor = float(scale)
    except (TypeError, ValueError):
        factor = math.nan
    if not -math.inf < factor < math.inf:
        raise UnsupportedInputError(f"scale is {scale!r}; it needs a finite number, or None")
    return factor


def check_sinks(sinks: torch.Tensor, heads_q: int, device: torch.device) -> None:
    """Refuse sinks that are not one number a query head, on the device of Q."""
    if len(sinks.shape) != 1 or sinks.shape[0] != heads_q:
        raise UnsupportedInputError(
            f"sinks is {tuple(sinks.shape)}; it needs one logit a query head, ({heads_q},)"
        )
    if sinks.dtype not in SINK_DTYPES:
        raise UnsupportedInputError(
            f"sinks is {sinks.dtype}; it needs float16, bfloat16 or float32"
        )
    if sinks.device != device:
        raise UnsupportedInputError(
            f"sinks is on {sinks.device} and q on {device}; move them to one device"
        )


def refusal(kernel: str, reason: FallbackReason) -> UnsupportedInputError:
    """Return the error of a kernel asked for by name that cannot take a call."""
    return UnsupportedInputError(
        f"kernel {kernel!r} cannot take this call: {reason}; use kernel='auto' to let the host's "
        "attention take such calls"
    )


def check_runnable(
    decision: Decision, device: torch.device, shape: CallShape, launch: LaunchConfig | None
) -> None:
    """Refuse what cannot run on this device, or not with the launch config that was given."""
    facts = dispatch.facts_of(device.type, device.index)
    check_place(decision, facts, RULES)
    if launch is not None:
        check_launch(launch, dispatch.call_key(shape, decision), facts, RULES)
