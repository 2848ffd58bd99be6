"""Both steps of a call, and calls of a key that was met before from their tape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sage_plugin.kernels.attention import run as runs
from sage_plugin.kernels.contract import Problem
from sage_plugin.kernels.launches import Memo
from sage_plugin.kernels.tape import Outputs, Tape, aligned, hooked, recording, tape_of

if TYPE_CHECKING:
    from sage_plugin.kernels.attention.plan import Plan

MOST_TAPES = 1024
"""Some 10 KB each; a language model meets a new length a token, and each in all of its layers."""


class _Entry(NamedTuple):
    """What is known of a key.

    Attributes:
        plan: kept alive, since its identity is part of the key.
        tape: its tape, if it has one.
        recordable: whether a call is worth recording.
    """

    plan: Plan
    tape: Tape | None
    recordable: bool


_entries: Memo[_Entry] = Memo(MOST_TAPES)


def run_once(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    *,
    out_dtype: torch.dtype | None,
    return_lse: bool,
) -> Outputs:
    """Both steps of a call, one after the other."""
    with runs.on_device(q.device), runs.without_autocast(q.device):
        asked = dataclasses.replace(problem, lse=return_lse)
        operands = plan.kernel.prepare(q, k, v, problem=asked, launch=plan.launch)
        return plan.kernel.launch(operands, out_dtype=out_dtype, return_lse=return_lse)


def run(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    *,
    out_dtype: torch.dtype | None,
    return_lse: bool,
) -> Outputs:
    """A call on a GPU: the first of its key as it is, the second recorded, the others replayed."""
    others = _others(problem)
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    addresses += [0 if t is None else t.data_ptr() for t in others]
    key = (
        id(plan), q.stride(), k.stride(), v.stride(), problem.scale, problem.window,
        problem.softcap, tuple([_form(t) for t in others]), out_dtype, return_lse,
    )  # fmt: skip
    entry = _entries.get(key)
    if entry is None:
        _entries.keep(key, _Entry(plan, None, True))
    elif entry.tape is not None and aligned(addresses) and not hooked():
        with runs.on_device(q.device):
            return entry.tape.replay(addresses)
    elif entry.recordable and aligned(addresses) and _apart(addresses) and not hooked():
        with recording() as recorder:
            outputs = run_once(plan, q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse)
        tape = tape_of(recorder, (q, k, v, *others), outputs)
        _entries.keep(key, _Entry(plan, tape, recordable=False))
        return outputs
    return run_once(plan, q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse)


def _apart(addresses: Sequence[int]) -> bool:
    """Whether no two inputs lie at one address, which a tape could not tell from one input."""
    given = [address for address in addresses if address]
    return len(set(given)) == len(given)


def _others(problem: Problem) -> tuple[torch.Tensor | None, ...]:
    """The inputs of a call besides Q, K and V; none of them where all would be `None`."""
    mask, sinks, packed = problem.mask, problem.sinks, problem.packed
    if packed is not None:
        return mask, sinks, packed.cu_seqlens_q, packed.cu_seqlens_k
    return () if mask is None and sinks is None else (mask, sinks)


def _form(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """All that launches read of a tensor but its address."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
