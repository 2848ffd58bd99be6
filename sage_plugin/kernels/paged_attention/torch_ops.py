"""The torch ops of the family: `paged_attention` with and without the LSE.

Ops get tensors, names and numbers only, look at the contents of no integer tensor on a GPU, and run
on the current stream.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.dispatch import parse_kernel
from sage_plugin.kernels.paged_attention.executor import resolve
from sage_plugin.kernels.paged_attention.validate import checked_call
from sage_plugin.kernels.resolver import BackendRequest

__all__ = ["library", "run_by_op"]

library = torch.library.Library("sage_plugin", "FRAGMENT")
_ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, "
    "Tensor cu_q_lens, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, float? scale, "
    "bool is_causal, int[]? window, float softcap, str kernel"
)


def run_by_op(call: PagedCall, kernel: str) -> Outputs:
    """Run a call by the op; traceable."""
    op: Any = torch.ops.sage_plugin
    window = None if call.window is None else list(call.window)
    given = (*call.tensors(), call.scale, call.is_causal, window, call.softcap, kernel)
    if call.return_lse:
        outputs: Outputs = op.paged_attention_with_lse(*given)
        return outputs
    return op.paged_attention(*given), None


@functools.lru_cache(maxsize=64)
def request_of(text: str) -> BackendRequest:
    """Return what a kernel's name asks for.

    Raises:
        UnknownKernelError: there is none of that name.
    """
    return BackendRequest(*parse_kernel(text))


def _call(given: tuple[Any, ...], return_lse: bool) -> PagedCall:
    *others, window, softcap, _ = given
    sides = None if window is None else tuple(window)
    return PagedCall(*others, sides, softcap, return_lse)  # type: ignore[call-arg]


def _run(*given: Any) -> torch.Tensor:  # noqa: ANN401
    call = _call(given, False)
    return resolve(call, request_of(given[-1])).run(call)[0]


def _run_with_lse(*given: Any) -> Outputs:  # noqa: ANN401
    call = _call(given, True)
    return resolve(call, request_of(given[-1])).run(call)


def _fake(*given: Any) -> torch.Tensor:  # noqa: ANN401
    call = _call(given, False)
    checked_call(call)
    return call.q.new_empty(call.q.shape)


def _fake_with_lse(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    out = _fake(*given)
    return out, out.new_empty((out.shape[1], out.shape[0]), dtype=torch.float32)


for _name, _returns, _real, _faked in (
    ("paged_attention", "Tensor", _run, _fake),
    ("paged_attention_with_lse", "(Tensor, Tensor)", _run_with_lse, _fake_with_lse),
):
    library.define(f"{_name}({_ARGUMENTS}) -> {_returns}")
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _real, _key)
    torch.library.register_fake(f"sage_plugin::{_name}", _faked, lib=library)
