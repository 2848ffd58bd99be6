"""What runs a call from its recorded launches, and how a call is resolved to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sage_plugin.kernels.attention import dispatch, validate
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.launch_space import RULES
from sage_plugin.kernels.attention.mask import is_added, mask_kind, of_heads
from sage_plugin.kernels.attention.recipes import built
from sage_plugin.kernels.contract import (
    HOST,
    AttentionParams,
    Decision,
    Implementation,
    ResolvedConfig,
)
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.repeats import Repeats
from sage_plugin.kernels.resolver import Resolution, Resolver
from sage_plugin.kernels.support import ON_GPUS
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.schema import CallKey, CallShape, DeviceFacts, LaunchConfig


class Executor(Repeats):
    """What runs the calls of one key: the decision, the config, and the launches once recorded.

    Attributes:
        decision: kernel and variant.
        kernel: its implementation.
        launch: the launch config that was given or found; `None` where nothing is tuned.
        found: where the launch config came from, `None` where it was given or nothing is tuned.
        key: the call key of its look-up, `None` where nothing is tuned.
    """

    __slots__ = ("_numbers", "decision", "found", "kernel", "key", "launch")

    def __init__(
        self,
        decision: Decision,
        kernel: Implementation[Any],
        numbers: AttentionParams,
        launch: LaunchConfig | None = None,
        found: ResolvedConfig | None = None,
        key: CallKey | None = None,
    ) -> None:
        super().__init__()
        self.decision, self.kernel = decision, kernel
        self.launch, self.found, self.key = launch, found, key
        self._numbers = numbers

    def params(self, call: AttentionCall) -> AttentionParams:
        """Return a call but for Q, K and V as kernels take it."""
        if call.attn_mask is None and call.sinks is None and call.packed is None:
            return self._numbers
        mask = validate.checked_mask(call.attn_mask, call.q, call.k, call.layout)
        return dataclasses.replace(self._numbers, mask=mask, sinks=call.sinks, packed=call.packed)

    def run(self, call: AttentionCall) -> Outputs:
        """Run a call of this key, on a GPU from the recorded launches once there are any."""
        if self.decision.variant in ON_GPUS and call.q.device.type != "cpu":
            return self.run_recorded(call)
        out, lse = self.run_anew(call)
        return (as_promised(call.q, out) if self.decision.variant == HOST else out), lse

    def run_recorded(self, call: AttentionCall) -> Outputs:
        """Run a call: the first of a key as it is, the second recorded, all others replayed."""
        return self.repeat(call.tensors(), call.q.device, self.run_anew, call)

    def run_anew(self, call: AttentionCall) -> Outputs:
        """Run both steps of a call, one after the other."""
        with on_device(call.q.device), without_autocast(call.q.device):
            operands = self.kernel.prepare(
                call.q, call.k, call.v, problem=self.params(call), launch=self.launch
            )
            return self.kernel.launch(
                operands, out_dtype=call.out_dtype, return_lse=call.return_lse
            )


def as_promised(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The host's output in the memory order that the fakes tell a compiler of."""
    promised = empty_as(q, out.dtype, out.shape[-1])
    return out if out.stride() == promised.stride() else promised.copy_(out)


def empty_as(q: torch.Tensor, dtype: torch.dtype, dv: int) -> torch.Tensor:
    """An output in Q's memory order where it has Q's shape, packed or not; the fakes use it too."""
    if dv == q.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], dv), dtype=dtype)


MOST_EXECUTORS = 1024
"""About 10 KB each. During decoding every token has a new length, which all layers share."""

Resolved = Executor | FallbackReason

HOST_REQUEST = KernelRequest("sdpa")
"""The host's attention as one of our kernels, for what SDPA does not know."""


def decide(
    call: AttentionCall, request: KernelRequest
) -> tuple[Decision, CallShape, torch.Tensor | None]:
    """Return where a call runs, its shape record, and its mask as kernels take it; traceable."""
    q, k, v = call.q, call.k, call.v
    validate.check_out_dtype(call.out_dtype)
    validate.check_tensors(q, k, v, call.layout)
    validate.check_dtypes(q, k, v)
    mask = validate.checked_mask(call.attn_mask, q, k, call.layout)
    shape = call.shape(mask_kind(mask))
    decision = dispatch.decide(
        shape,
        dispatch.facts_of(q.device.type, q.device.index),
        kernel=request.kernel,
        variant=request.variant,
        min_seq=request.min_seq,
        dropout=call.dropout_p,
        needs_grad=call.needs_grad,
        special=call.is_special or of_heads(mask),
        additive=is_added(mask),
    )
    return decision, shape, mask


def _decided(call: AttentionCall, _: DeviceFacts, request: KernelRequest) -> Decision:
    return decide(call, request)[0]


def _launch_key(call: AttentionCall, decision: Decision) -> CallKey | None:
    if decision.kernel == "sdpa":
        return None
    mask = validate.checked_mask(call.attn_mask, call.q, call.k, call.layout)
    return dispatch.call_key(call.shape(mask_kind(mask)), decision)


def _build(call: AttentionCall, request: KernelRequest, found: Resolution) -> Resolved:
    decision, facts, launch, origin, key = found
    if request.changes and key is not None:
        launch, origin = launch.replaced(**dict(request.changes)), None
        illegal = RULES.illegal_reason(launch, key, facts)
        if illegal is not None:
            return FallbackReason(Fallback.ILLEGAL_CONFIG, illegal)
    return Executor(decision, built(decision, facts), _numbers_of(call), launch, origin, key)


def _numbers_of(call: AttentionCall) -> AttentionParams:
    """Return what kernels take of a call besides its tensors."""
    window, softcap, scale = validate.checked_rest(
        call.q, call.layout, call.window, call.softcap, call.scale, call.sinks
    )
    return AttentionParams(
        scale, call.is_causal, call.layout, None, window, softcap, lse=call.return_lse
    )


resolver: Resolver[Resolved] = Resolver(_decided, _launch_key, RULES, _build, Memo(MOST_EXECUTORS))
known, resolve = resolver.known, resolver.resolve
