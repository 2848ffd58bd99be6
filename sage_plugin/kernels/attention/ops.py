"""The torch ops of the family: `sage_plugin::attention` and `sage_plugin::attention_with_lse`.

Registered through `torch.library.Library`, with fakes that return the real strides. An op gets
names and numbers only, looks its launch config up through the memo, and runs on the current stream
of Q's device.
"""

from __future__ import annotations

import contextlib
import functools
import json
from contextlib import AbstractContextManager

import torch

from sage_plugin.kernels import dispatch
from sage_plugin.kernels.attention.implementations import implementation
from sage_plugin.kernels.contract import HOST, Decision, Problem, empty_lse, empty_output
from sage_plugin.schema import CallShape, LaunchConfig

library = torch.library.Library("sage_plugin", "DEF")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float scale, bool causal, str kernel, str variant, str layout, "
    "str launch, str config_dir, ScalarType? out_dtype"
)
library.define(f"attention({_ARGUMENTS}) -> Tensor")
library.define(f"attention_with_lse({_ARGUMENTS}) -> (Tensor, Tensor)")


def shape_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    layout: str,
    mask_kind: str = "none",
) -> CallShape:
    """The shape record of a call; its dtype is Q's, or a wider one of K or V."""
    widest = k if k.dtype.itemsize > q.dtype.itemsize else q
    widest = v if v.dtype.itemsize > widest.dtype.itemsize else widest
    heads, seq = (1, 2) if layout == "bhsd" else (2, 1)
    return CallShape(
        batch=q.shape[0],
        heads_q=q.shape[heads],
        heads_k=k.shape[heads],
        seq_q=q.shape[seq],
        seq_k=k.shape[seq],
        head_dim=q.shape[3],
        dv=v.shape[3],
        dtype=str(widest.dtype).removeprefix("torch."),
        causal=causal,
        mask_kind=mask_kind,
        layout=layout,
        scale=scale,
    )


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    kernel: str,
    variant: str,
    layout: str,
    launch: str,
    config_dir: str,
    out_dtype: torch.dtype | None,
    *,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    facts = dispatch.facts_of(q.device.type, q.device.index)
    config = None
    if variant != HOST:
        if launch:
            config = _parsed(launch)
        else:
            shape = shape_of(q, k, v, causal=causal, scale=scale, layout=layout)
            key = dispatch.call_key(shape, Decision(kernel, variant))
            config = dispatch.find_launch(key, facts, config_dir=config_dir or None).config
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    built = implementation(kernel, variant, fp8)
    with _on_device_of(q), torch.autocast(q.device.type, enabled=False):
        operands = built.prepare(q, k, v, problem=Problem(scale, causal, layout), launch=config)
        out, lse = built.launch(operands, out_dtype=out_dtype, return_lse=return_lse)
    return (_as_promised(q, out) if variant == HOST else out), lse


def _as_promised(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The host's output in the memory order that the fakes tell a compiler of."""
    promised = empty_output(q, out.dtype, out.shape[3])
    return out if out.stride() == promised.stride() else promised.copy_(out)


def _on_device_of(q: torch.Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()


@functools.lru_cache(maxsize=1024)
def _parsed(launch: str) -> LaunchConfig:
    return LaunchConfig.from_json(json.loads(launch))


def _attention(*args: object) -> torch.Tensor:
    out, _ = _run(*args, return_lse=False)  # type: ignore[arg-type]
    return out


def _attention_with_lse(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _run(*args, return_lse=True)  # type: ignore[arg-type]
    assert lse is not None
    return out, lse


def _fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, kernel: str,
    variant: str, layout: str, launch: str, config_dir: str, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    return empty_output(q, out_dtype or v.dtype, v.shape[3])


def _fake_attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, kernel: str,
    variant: str, layout: str, launch: str, config_dir: str, out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return empty_output(q, out_dtype or v.dtype, v.shape[3]), empty_lse(q, layout)


for _name, _real, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention_with_lse", _attention_with_lse, _fake_attention_with_lse),
):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _real, _key)
    torch.library.register_fake(f"sage_plugin::{_name}", _fake, lib=library)
