"""Problems of every kind for tests, and twins run on them."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import NO_WINDOW, AttentionParams, Packed
from tests.kernels.calls import Shape, launch

MASKS = ("none", "bool", "float", "key_bool", "key_float", "head_bool", "dead_rows")


def mask_of(kind: str, shape: Shape, seed: int = 0) -> torch.Tensor | None:
    """A normalised mask; each kind hides about a third of the keys."""
    generator = torch.Generator().manual_seed(seed)
    full = {
        "bool": (1, 1, shape.seq_q, shape.seq_k),
        "float": (shape.batch, 1, shape.seq_q, shape.seq_k),
        "key_bool": (shape.batch, 1, 1, shape.seq_k),
        "key_float": (1, 1, 1, shape.seq_k),
        "head_bool": (1, shape.heads_q, 1, shape.seq_k),
        "dead_rows": (1, shape.heads_q, shape.seq_q, shape.seq_k),
    }
    if kind == "none":
        return None
    keep = torch.rand(full[kind], generator=generator) > 0.35
    if kind == "dead_rows":
        keep[:, :, :: max(1, shape.seq_q // 3)] = False
    if not kind.endswith("float"):
        return keep
    bias = 2 * torch.randn(full[kind], generator=generator)
    bias = bias.masked_fill(~keep, -torch.inf)
    lowest = torch.rand(full[kind], generator=generator) > 0.8
    return bias.masked_fill(~keep & lowest, torch.finfo(torch.float32).min)


@st.composite
def problems(make: st.DrawFn, longest: int = 140) -> tuple[Shape, AttentionParams]:
    """A shape, and a problem with any of the parts that a call may have."""
    heads_k = make(st.integers(1, 2))
    shape = Shape(
        batch=make(st.integers(1, 2)),
        heads_q=heads_k * make(st.integers(1, 3)),
        heads_k=heads_k,
        seq_q=make(st.integers(1, longest)),
        seq_k=make(st.integers(1, longest)),
        dim=make(st.sampled_from([8, 40, 64, 96])),
    )
    side = st.sampled_from([-1, 0, 1, 7, 40])
    sinks = make(st.sampled_from([None, -3.0, 0.0, 4.0]))
    problem = AttentionParams(
        scale=make(st.sampled_from([shape.dim**-0.5, 0.3])),
        causal=make(st.booleans()),
        layout="bhsd",
        mask=mask_of(make(st.sampled_from(MASKS)), shape, make(st.integers(0, 9))),
        window=make(st.one_of(st.just(NO_WINDOW), st.tuples(side, side))),
        softcap=make(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        sinks=None if sinks is None else sinks + torch.arange(shape.heads_q) / 2,
    )
    return shape, problem


def run(kernel, q, k, v, problem, *, out_dtype=torch.float32, **fields):
    """Output and LSE of a kernel's twin, before the last rounding."""
    if kernel in ("torch", "sdpa"):
        built = implementation(kernel, "host")
    else:
        built = implementation(kernel, "emulation")
    operands = built.prepare(q, k, v, problem=problem, launch=launch(**fields))
    return built.launch(operands, out_dtype=out_dtype, return_lse=True)


def packed_of(ends_q, ends_k):
    longest = [max(b - a for a, b in itertools.pairwise(e)) for e in (ends_q, ends_k)]
    tensors = [torch.tensor(e, dtype=torch.int32) for e in (ends_q, ends_k)]
    return Packed(*tensors, *longest)
