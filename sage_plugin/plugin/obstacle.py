"""Why an attention call stays with the model's own attention, whatever the kernel."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext

from sage_plugin.kernels.attention.call import TENSOR_SUBCLASS, AttentionCall, is_plain
from sage_plugin.kernels.attention.validate import FLOATS
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.context import PatchState

DISABLED = FallbackReason(Fallback.DISABLED)
FUNCTION_MODE = FallbackReason(Fallback.FUNCTION_MODE)
SHAPE = FallbackReason(Fallback.SHAPE)
CAUSAL = FallbackReason(Fallback.CAUSAL_ALIGNMENT)
DEVICES = ("cpu", "cuda")


def obstacle(state: PatchState, call: AttentionCall) -> FallbackReason | None:
    """Return why a call cannot or shall not leave the host, as far as no kernel is asked."""
    q, k, v, options = call.q, call.k, call.v, state.options
    if state.disabled:
        return DISABLED
    if not torch.compiler.is_compiling() and _watched():
        return FUNCTION_MODE
    if not (is_plain(v) and (call.prologue is not None or (is_plain(q) and is_plain(k)))):
        return TENSOR_SUBCLASS
    if q.device.type not in DEVICES:
        return FallbackReason(Fallback.DEVICE, q.device.type)
    if not fits(call):
        return SHAPE
    for tensor in (q, k, v):
        if tensor.dtype not in FLOATS:
            return FallbackReason(Fallback.DTYPE, str(tensor.dtype).removeprefix("torch."))
    seq = 2 if call.layout == "bhsd" else 1
    if not (_surely(q.shape[seq] >= options.min_seq) and _surely(k.shape[seq] >= options.min_seq)):
        return FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, options.min_seq)
    return CAUSAL if call.is_causal and not _surely(q.shape[seq] == k.shape[seq]) else None


def _watched() -> bool:
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def fits(call: AttentionCall) -> bool:
    """Return whether SDPA would neither broadcast nor refuse these shapes."""
    q, k, v = call.q, call.k, call.v
    if not (q.dim() == k.dim() == v.dim() == 4):
        return False
    heads, seq = (1, 2) if call.layout == "bhsd" else (2, 1)
    grouped = call.enable_gqa and k.shape[heads] > 0 and q.shape[heads] % k.shape[heads] == 0
    return (
        _surely(q.shape[0] == k.shape[0])
        and _surely(k.shape[0] == v.shape[0])
        and (_surely(q.shape[heads] == k.shape[heads]) or grouped)
        and _surely(k.shape[heads] == v.shape[heads])
        and _surely(k.shape[seq] == v.shape[seq])
        and _surely(q.shape[3] == k.shape[3])
        and q.device == k.device == v.device
        and (call.sinks is None or call.sinks.shape == (q.shape[heads],))
    )


def _surely(condition: bool) -> bool:
    """Whether sizes compare so; no, where a graph cannot tell, since they follow from data."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which imports sympy

    return guard_or_false(condition)
