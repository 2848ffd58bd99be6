"""Resolve a call before its data is touched, once per key, and run it from its recorded launches.

The key is all that the answers follow from: shapes, dtypes and devices of the tensors, what was
asked for, and the environment. A call of a known key costs one look at a dict and its launches;
`dispatch.forget` drops them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sage_plugin import settings
from sage_plugin.kernels.attention import dispatch, runtime, validate
from sage_plugin.kernels.attention.mask import is_added, mask_kind, of_heads
from sage_plugin.kernels.contract import HOST, AttentionParams, Decision, Implementation, Packed
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import Outputs, Tape, aligned, hooked, recording, tape_of
from sage_plugin.kernels.support import ON_GPUS
from sage_plugin.schema import CallShape, LaunchConfig


class Executor(NamedTuple):
    """What a call runs on.

    Attributes:
        decision: kernel and variant.
        kernel: its implementation.
        launch: the launch config that was given or found; `None` where nothing is tuned.
    """

    decision: Decision
    kernel: Implementation[Any]
    launch: LaunchConfig | None

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
        """Both steps at once, where the tensors are; on a GPU from a tape, once there is one."""
        on_gpu = self.decision.variant in ON_GPUS and q.device.type != "cpu"
        both = run_cached if on_gpu else run_uncached
        out, lse = both(self, q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse)
        return (runtime.as_promised(q, out) if self.decision.variant == HOST else out), lse


_plans: Memo[Executor] = Memo()


def planned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    asked: tuple[object, ...],
    make: Callable[[], Executor],
) -> Executor:
    """The plan of a call, made where there is none yet; eager mode only.

    Args:
        q: queries.
        k: keys.
        v: values.
        asked: all else that the plan follows from.
        make: makes the plan, or raises what the caller shall see.
    """
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, asked,
        settings.of_calls(),
    )  # fmt: skip
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument without a hash
        return make()
    if plan is None:
        plan = make()
        if plan.decision.variant not in ON_GPUS or q.device.type != "cpu":  # TRITON_INTERPRET's say
            _plans.keep(key, plan)
    return plan


def settled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: bool,
    layout: str,
    kernel: str,
    variant: str,
    launch: LaunchConfig | None,
    config_dir: str | None,
    min_seq: int = 0,
    dropout: float = 0.0,
    needs_grad: bool = False,
    special: bool = False,
) -> tuple[Executor, torch.Tensor | None]:
    """The plan of a call as `attention` takes it, and its mask as kernels take it; eager mode only.

    Raises:
        UnsupportedInputError: as `decided` and `plan_of`.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: the environment's launch config is not legal.
    """

    def make() -> Executor:
        decision, shape, _ = decided(
            q, k, v, attn_mask, causal=causal, layout=layout, kernel=kernel, variant=variant,
            min_seq=min_seq, dropout=dropout, needs_grad=needs_grad, special=special,
        )  # fmt: skip
        given = None if decision.kernel == "sdpa" else launch
        return plan_of(decision, shape, q.device, given, str(config_dir) if config_dir else None)

    form = None
    if attn_mask is not None:
        form = (attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device)
    asked = (
        form, causal, layout, kernel, variant, launch, config_dir, min_seq, dropout, needs_grad,
        special,
    )  # fmt: skip
    plan = planned(q, k, v, asked, make)
    return plan, validate.checked_mask(attn_mask, q, k, layout)


def decided(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    packed: Packed | None = None,
    *,
    causal: bool,
    layout: str,
    kernel: str,
    variant: str,
    min_seq: int = 0,
    dropout: float = 0.0,
    needs_grad: bool = False,
    special: bool = False,
) -> tuple[Decision, CallShape, torch.Tensor | None]:
    """Where a call runs, its shape record, and its mask as kernels take it; traceable.

    Raises:
        UnsupportedInputError: tensors that do not fit together, or a named kernel that cannot take
            them.
        UnknownKernelError: no kernel or variant of that name.
    """
    if packed is None:
        validate.check_tensors(q, k, v, layout)
    validate.check_dtypes(q, k, v)
    mask = validate.checked_mask(attn_mask, q, k, layout)
    shape = runtime.shape_of(
        q, k, v, causal=causal, scale=1.0, layout=layout, mask_kind=mask_kind(mask), packed=packed
    )
    decision = dispatch.decide(
        shape,
        dispatch.facts_of(q.device.type, q.device.index),
        kernel=kernel,
        variant=variant,
        min_seq=min_seq if kernel == "auto" else 0,
        dropout=dropout,
        needs_grad=needs_grad,
        special=special or packed is not None or of_heads(mask),
        additive=is_added(mask),
    )
    validate.refuse_named(decision, kernel)
    return decision, shape, mask


def plan_of(
    decision: Decision,
    shape: CallShape,
    device: torch.device,
    launch: LaunchConfig | None,
    config_dir: str | None,
) -> Executor:
    """The plan of a call that is decided.

    Raises:
        UnsupportedInputError: the kernel needs a GPU, or the launch config is not legal.
        ConfigError: the environment's launch config is not legal.
    """
    validate.check_runnable(decision, device, shape, launch)
    facts = dispatch.facts_of(device.type, device.index)
    if launch is None and decision.variant != HOST:
        key = dispatch.call_key(shape, decision)
        launch = dispatch.find_launch(key, facts, config_dir=config_dir).config
    return Executor(decision, runtime.built(decision, facts), launch)


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
