"""What runs a call from its recorded launches, and how a call is resolved to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sage_plugin.kernels.attention import dispatch, validate
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.launch_space import RULES
from sage_plugin.kernels.attention.mask import is_added, mask_kind, of_heads
from sage_plugin.kernels.attention.prologue.agree import operands_agree
from sage_plugin.kernels.attention.prologue.one_pass import OnePass, one_pass_reason
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.attention.recipes import built
from sage_plugin.kernels.build_error import build_failure
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
        one_pass: why norm and embedding of Q and K are a pass before this call's kernel; `None`
            where quantization does them, or there are none to do.
        compared: whether `compare` has looked at what quantization makes of them.
        launch: the launch config that was given or found; `None` where nothing is tuned.
        found: where the launch config came from, `None` where it was given or nothing is tuned.
        key: the call key of its look-up, `None` where nothing is tuned.
    """

    __slots__ = (
        "_numbers", "_with_prologue", "compared", "decision", "found", "kernel", "key", "launch",
        "one_pass",
    )  # fmt: skip

    def __init__(
        self,
        decision: Decision,
        kernel: Implementation[Any],
        numbers: AttentionParams,
        launch: LaunchConfig | None = None,
        found: ResolvedConfig | None = None,
        key: CallKey | None = None,
        *,
        prologue: QkPair | None = None,
    ) -> None:
        super().__init__()
        self.decision, self.kernel = decision, kernel
        self.launch, self.found, self.key = launch, found, key
        self._numbers = numbers
        self._with_prologue, self.compared = prologue is not None, False
        self.one_pass: OnePass | None = None
        if prologue is not None:
            self.one_pass = one_pass_reason(decision, launch, numbers, prologue)

    def params(self, call: AttentionCall) -> AttentionParams:
        """Return a call but for Q, K and V as kernels take it."""
        if call.attn_mask is None and call.sinks is None and call.packed is None:
            return self._numbers
        mask = validate.checked_mask(call.attn_mask, call.q, call.k, call.layout)
        return dataclasses.replace(self._numbers, mask=mask, sinks=call.sinks, packed=call.packed)

    def run(self, call: AttentionCall) -> Outputs:
        """Run a call of this key, on a GPU from the recorded launches once there are any."""
        if self.one_pass is not None:
            call = call.made()
        if self.decision.variant in ON_GPUS and call.q.device.type != "cpu":
            return self.run_recorded(call)
        out, lse = self.run_anew(call)
        return (as_promised(call.q, out) if self.decision.variant == HOST else out), lse

    def run_recorded(self, call: AttentionCall) -> Outputs:
        """Run a call: the first of a key as it is, the second recorded, all others replayed."""
        if self._with_prologue and self.one_pass is None and call.prologue is None:
            return self.run_anew(call)  # whose launches are not those of this key
        keyed = () if call.prologue is None else call.prologue.inputs()
        return self.repeat(call.tensors(), call.q.device, self.run_anew, call, keyed=keyed)

    def run_anew(self, call: AttentionCall) -> Outputs:
        """Run both steps of a call, one after the other."""
        with on_device(call.q.device), without_autocast(call.q.device):
            return self.kernel.launch(
                self.prepared(call), out_dtype=call.out_dtype, return_lse=call.return_lse
            )

    def prepared(self, call: AttentionCall) -> Any:  # noqa: ANN401
        """Run the first step of a call, with what is left to do of norm and embedding."""
        kernel: Any = self.kernel
        if call.prologue is not None and self.one_pass is None:
            try:
                return kernel.prepare_unmade(
                    call.prologue, call.q, call.k, call.v, problem=self.params(call),
                    launch=self.launch,
                )  # fmt: skip
            except Exception as error:
                if build_failure(error) is None:
                    raise
                self.one_pass = OnePass.BUILD_FAILED
        call = call.made()
        return kernel.prepare(call.q, call.k, call.v, problem=self.params(call), launch=self.launch)

    def compare(self, call: AttentionCall) -> None:
        """Compare operands of one pass with those of two, and leave the one where they differ."""
        self.compared, made = True, call.made()
        with on_device(call.q.device), without_autocast(call.q.device):
            one, two = self.prepared(call), self.prepared(made)
            if self.one_pass is None and not operands_agree(one, two):
                self.one_pass = OnePass.DIFFERENT
                self.forget()


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
    return Executor(
        decision, built(decision, facts), _numbers_of(call), launch, origin, key,
        prologue=call.prologue,
    )  # fmt: skip


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
