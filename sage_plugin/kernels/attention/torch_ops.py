"""The torch ops of the family: `attention` and `attention_varlen`, each with and without the LSE.

Registered through `torch.library.Library`, with fakes that return the real strides. An op gets
tensors, names and numbers only, looks its launch config up through the memo, and runs on the
current stream of Q's device.

The ops have no backward. A kernel under torch's Autograd key that says so would cost every call a
second pass through the dispatcher (some 4 us), so the implementations and the fakes look
themselves: what needs a gradient is refused before it can be detached, in eager mode and while a
compiler traces.
"""

from __future__ import annotations

import functools
import json
from itertools import pairwise

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.executor import Executor, empty_as, resolve
from sage_plugin.kernels.attention.validate import check_out_dtype, refusal
from sage_plugin.kernels.contract import NO_WINDOW, Packed, lse_shape
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.surroundings import wants_gradient
from sage_plugin.schema import LaunchConfig

__all__ = ["attention_now", "attention_with_lse_now", "library", "text_of"]

library = torch.library.Library("sage_plugin", "DEF")
_INPUTS = "Tensor q, Tensor k, Tensor v, "
_NUMBERS = (
    "Tensor? sinks, float scale, bool causal, int window_left, int window_right, float softcap, "
    "str kernel, str variant, "
)
_REST = "str launch, str config_dir, ScalarType? out_dtype"
_PACKED = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
_ARGUMENTS = f"{_INPUTS}Tensor? mask, {_NUMBERS}str layout, {_REST}"
_VARLEN_ARGUMENTS = f"{_INPUTS}{_PACKED}{_NUMBERS}{_REST}"


@functools.lru_cache(maxsize=1024)
def _text(launch: LaunchConfig) -> str:
    return launch.text()


def text_of(launch: LaunchConfig | None) -> str:
    """A launch config as the op takes it; a constant to a compiler, which cannot trace `json`."""
    return "" if launch is None else _text(launch)


text_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _request(kernel: str, variant: str, launch: str, config_dir: str) -> KernelRequest:
    config = LaunchConfig.from_json(json.loads(launch)) if launch else None
    return KernelRequest(kernel, variant, config, config_dir or None)


def _refuse_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    if wants_gradient(q, k, v, mask, sinks):
        raise UnsupportedInputError(
            "the ops of sage_plugin have no backward and an input requires a gradient; call "
            "sage_plugin.attention, which leaves such calls to the host's attention, or call the "
            "op under torch.no_grad()"
        )


def _executor(call: AttentionCall, request: KernelRequest) -> Executor:
    """Return what runs a call whose kernel is named, by us or by a caller of the op."""
    resolved = resolve(call, request)
    if isinstance(resolved, FallbackReason):
        raise refusal(request.kernel, resolved)
    return resolved


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, causal: bool, left: int, right: int, softcap: float,
    kernel: str, variant: str, layout: str, launch: str, config_dir: str,
    out_dtype: torch.dtype | None, *, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    _refuse_gradient(q, k, v, mask, sinks)
    call = AttentionCall(
        q, k, v, mask, 0.0, causal, scale, True, layout, softcap, sinks, return_lse,
        None if (left, right) == NO_WINDOW else (left, right), out_dtype=out_dtype,
    )  # fmt: skip
    return _executor(call, _request(kernel, variant, launch, config_dir)).run(call)


def _run_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, sinks: torch.Tensor | None,
    scale: float, causal: bool, left: int, right: int, softcap: float, kernel: str, variant: str,
    launch: str, config_dir: str, out_dtype: torch.dtype | None, *, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    _refuse_gradient(q, k, v, None, sinks)
    q, k, v = q[None], k[None], v[None]
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = None if (left, right) == NO_WINDOW else (left, right)
    call = AttentionCall(
        q, k, v, None, 0.0, causal, scale, True, "bshd", softcap, sinks, return_lse, window, packed,
        out_dtype,
    )  # fmt: skip
    executor = _executor(call, _request(kernel, variant, launch, config_dir))
    if q.device.type == "cpu":  # reading them on a GPU would wait for it
        _check_lengths("q", cu_seqlens_q.tolist(), max_seqlen_q, q.shape[1])
        _check_lengths("k", cu_seqlens_k.tolist(), max_seqlen_k, k.shape[1])
    out, lse = executor.run(call)
    return out[0], None if lse is None else lse[0]


def _check_lengths(name: str, ends: list[int], longest: int, total: int) -> None:
    lengths = [after - before for before, after in pairwise(ends)]
    if ends[0] != 0 or min(lengths, default=0) < 0 or ends[-1] > total:
        raise UnsupportedInputError(
            f"cu_seqlens_{name} is {ends}; it needs to rise from 0 to the {total} rows of {name}"
        )
    if max(lengths, default=0) > longest:
        raise UnsupportedInputError(
            f"a sequence of {name} has {max(lengths)} rows and max_seqlen_{name} is {longest}"
        )


def attention_now(*args: object) -> torch.Tensor:
    """What `torch.ops.sage_plugin.attention` does."""
    return _run(*args, return_lse=False)[0]  # type: ignore[arg-type]


def attention_with_lse_now(*args: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `torch.ops.sage_plugin.attention_with_lse` does."""
    return _run(*args, return_lse=True)  # type: ignore[arg-type]


def _varlen(*args: object) -> torch.Tensor:
    return _run_varlen(*args, return_lse=False)[0]  # type: ignore[arg-type]


def _varlen_with_lse(*args: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _run_varlen(*args, return_lse=True)  # type: ignore[arg-type]


def _fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, *rest: object,
) -> torch.Tensor:  # fmt: skip
    _refuse_gradient(q, k, v, mask, sinks)
    return empty_as(q, _out_dtype(rest, v), v.shape[3])


def _fake_attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, *rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    lse = q.new_empty(lse_shape(q.shape, str(rest[-4])), dtype=torch.float32)
    return _fake_attention(q, k, v, mask, sinks, *rest), lse


def _fake_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    sinks = rest[4]
    assert sinks is None or isinstance(sinks, torch.Tensor)
    _refuse_gradient(q, k, v, None, sinks)
    return empty_as(q, _out_dtype(rest, v), v.shape[2])


def _fake_varlen_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return _fake_varlen(q, k, v, *rest), lse


def _out_dtype(rest: tuple[object, ...], v: torch.Tensor) -> torch.dtype:
    check_out_dtype(rest[-1])  # type: ignore[arg-type]
    return rest[-1] if isinstance(rest[-1], torch.dtype) else v.dtype


for _name, _arguments, _real, _fake in (
    ("attention", _ARGUMENTS, attention_now, _fake_attention),
    ("attention_with_lse", _ARGUMENTS, attention_with_lse_now, _fake_attention_with_lse),
    ("attention_varlen", _VARLEN_ARGUMENTS, _varlen, _fake_varlen),
    ("attention_varlen_with_lse", _VARLEN_ARGUMENTS, _varlen_with_lse, _fake_varlen_with_lse),
):
    _returns = "(Tensor, Tensor)" if _name.endswith("_lse") else "Tensor"
    library.define(f"{_name}({_arguments}) -> {_returns}")
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _real, _key)
    torch.library.register_fake(f"sage_plugin::{_name}", _fake, lib=library)
