"""Resolve a call before its data is touched, once per key, and run it from its recorded launches.

The key is all that the answers follow from: shapes, dtypes and devices of the tensors, what was
asked for, and the environment. A call of a known key costs one look at a dict and its launches;
`dispatch.forget` drops them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sage_plugin import settings
from sage_plugin.kernels.attention import dispatch, runtime, validate
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.mask import is_added, mask_kind, of_heads
from sage_plugin.kernels.contract import (
    HOST,
    AttentionParams,
    Decision,
    Implementation,
    ResolvedConfig,
)
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import Outputs, Tape, aligned, hooked, recording, tape_of
from sage_plugin.kernels.support import ON_GPUS
from sage_plugin.schema import CallKey, CallShape, LaunchConfig


class Executor(NamedTuple):
    """What runs the calls of one key.

    Attributes:
        decision: kernel and variant.
        kernel: its implementation.
        launch: the launch config that was given or found; `None` where nothing is tuned.
        found: where the launch config came from, `None` where it was given or nothing is tuned.
        key: the call key of its look-up, `None` where nothing is tuned.
    """

    decision: Decision
    kernel: Implementation[Any]
    launch: LaunchConfig | None
    found: ResolvedConfig | None = None
    key: CallKey | None = None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: AttentionParams,
        *,
        out_dtype: torch.dtype | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run both steps at once; on a GPU from the recorded launches, once there are any."""
        on_gpu = self.decision.variant in ON_GPUS and q.device.type != "cpu"
        both = run_cached if on_gpu else run_uncached
        out, lse = both(self, q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse)
        return (runtime.as_promised(q, out) if self.decision.variant == HOST else out), lse


Resolved = Executor | FallbackReason
_resolved: Memo[Resolved] = Memo()

HOST_REQUEST = KernelRequest("sdpa")
"""The host's attention as one of our kernels, for what SDPA does not know."""


def resolve(call: AttentionCall, request: KernelRequest) -> Resolved:
    """Return what runs a call, or why it stays with the host's attention; eager mode only.

    The answer is remembered by all that it follows from, the environment too.

    Raises:
        UnsupportedInputError: tensors that do not fit together, a kernel that needs a GPU, or a
            launch config that is not legal.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: the environment's launch config is not legal.
    """
    key = (call.key(), request, settings.of_calls())
    try:
        answer = _resolved.get(key)
    except TypeError:  # an argument without a hash
        return _resolve(call, request)
    if answer is None:
        answer = _resolve(call, request)
        on_gpu = isinstance(answer, Executor) and answer.decision.variant in ON_GPUS
        if not on_gpu or call.q.device.type != "cpu":  # that depends on TRITON_INTERPRET
            _resolved.keep(key, answer)
    return answer


def decide(
    call: AttentionCall, request: KernelRequest
) -> tuple[Decision, CallShape, torch.Tensor | None]:
    """Return where a call runs, its shape record, and its mask as kernels take it; traceable.

    Raises:
        UnsupportedInputError: tensors that do not fit together.
        UnknownKernelError: no kernel or variant of that name.
    """
    q, k, v = call.q, call.k, call.v
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


def _resolve(call: AttentionCall, request: KernelRequest) -> Resolved:
    decision, shape, _ = decide(call, request)
    return decision.reason or build_executor(decision, shape, call.q.device, request)


def build_executor(
    decision: Decision, shape: CallShape, device: torch.device, request: KernelRequest
) -> Resolved:
    """Build what runs a decision, or say why its launch config cannot be changed so.

    Raises:
        UnsupportedInputError: the kernel needs a GPU, or the launch config is not legal.
        ConfigError: the environment's launch config is not legal.
    """
    launch = None if decision.kernel == "sdpa" else request.launch
    validate.check_runnable(decision, device, shape, launch)
    facts = dispatch.facts_of(device.type, device.index)
    kernel = runtime.built(decision, facts)
    if launch is not None or decision.variant == HOST:
        return Executor(decision, kernel, launch)
    key = dispatch.call_key(shape, decision)
    config_dir = str(request.config_dir) if request.config_dir else None
    found = dispatch.find_launch(key, facts, config_dir=config_dir)
    if not request.changes:
        return Executor(decision, kernel, found.config, found, key)
    config = found.config.replaced(**dict(request.changes))
    illegal = dispatch.illegal_reason(config, key, facts)
    if illegal is not None:
        return FallbackReason(Fallback.ILLEGAL_CONFIG, illegal)
    return Executor(decision, kernel, config, None, key)


MOST_TAPES = 1024
"""Some 10 KB each; a language model meets a new length a token, and each in all of its layers."""


class _Entry(NamedTuple):
    """What is known of a key.

    Attributes:
        plan: kept alive, since its identity is part of the key.
        tape: its tape, if it has one.
        recordable: whether a call is worth recording.
    """

    plan: Executor
    tape: Tape | None
    recordable: bool


_entries: Memo[_Entry] = Memo(MOST_TAPES)


def run_uncached(
    plan: Executor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: AttentionParams,
    *,
    out_dtype: torch.dtype | None,
    return_lse: bool,
) -> Outputs:
    """Both steps of a call, one after the other."""
    with runtime.on_device(q.device), runtime.without_autocast(q.device):
        asked = dataclasses.replace(problem, lse=return_lse)
        operands = plan.kernel.prepare(q, k, v, problem=asked, launch=plan.launch)
        return plan.kernel.launch(operands, out_dtype=out_dtype, return_lse=return_lse)


def run_cached(
    plan: Executor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: AttentionParams,
    *,
    out_dtype: torch.dtype | None,
    return_lse: bool,
) -> Outputs:
    """A call on a GPU: the first of its key as it is, the second recorded, the others replayed."""
    others = _extra_tensors(problem)
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    addresses += [0 if t is None else t.data_ptr() for t in others]
    key = (
        id(plan), q.stride(), k.stride(), v.stride(), problem.scale, problem.window,
        problem.softcap, tuple([_tensor_spec(t) for t in others]), out_dtype, return_lse,
    )  # fmt: skip
    entry = _entries.get(key)
    if entry is None:
        _entries.keep(key, _Entry(plan, None, True))
    elif entry.tape is not None and aligned(addresses) and not hooked():
        with runtime.on_device(q.device):
            return entry.tape.replay(addresses)
    elif entry.recordable and aligned(addresses) and _no_aliasing(addresses) and not hooked():
        with recording() as recorder:
            outputs = run_uncached(
                plan, q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse
            )
        tape = tape_of(recorder, (q, k, v, *others), outputs)
        _entries.keep(key, _Entry(plan, tape, recordable=False))
        return outputs
    return run_uncached(plan, q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse)


def _no_aliasing(addresses: Sequence[int]) -> bool:
    """Whether no two inputs lie at one address, which a tape could not tell from one input."""
    given = [address for address in addresses if address]
    return len(set(given)) == len(given)


def _extra_tensors(problem: AttentionParams) -> tuple[torch.Tensor | None, ...]:
    """The inputs of a call besides Q, K and V; none of them where all would be `None`."""
    mask, sinks, packed = problem.mask, problem.sinks, problem.packed
    if packed is not None:
        return mask, sinks, packed.cu_seqlens_q, packed.cu_seqlens_k
    return () if mask is None and sinks is None else (mask, sinks)


def _tensor_spec(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """All that launches read of a tensor but its address."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
