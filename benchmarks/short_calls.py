"""Short and small calls: from which size on our kernels beat the fastest of torch's SDPA backends.

For each head dim, number of heads and length: the fastest SDPA backend (flash, cuDNN, memory
efficient) and our kernels, interleaved, with warm caches as in a model. "eager" is a call as Python
makes it, launch gaps included; "graph" is its replay in a CUDA graph. A ratio above 1 is in our
favour. With `--prologue` Q and K come through a norm and a rotary embedding first: torch's
operations before SDPA, as models have them, and our pass before our kernels.

    python benchmarks/short_calls.py --output short_calls.json [--causal] [--prologue]
        [--lengths 256,512,...]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import identity, kernels, launch_of, numbers, write
from gpu_options import gpu_parser, on_gpu, positive
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.kernels.attention import dispatch
from sage_plugin.measure.inputs import self_attention, synthetic
from sage_plugin.measure.timing import measure
from sage_plugin.schema import CallShape

OURS = ("fav3_sage", "sage")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS = (2, 8, 32)
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
METHODS = {"eager": "events", "graph": "graph"}

Call = Callable[[], object]
Facts = dict[str, Any]


def calls_of(shape: CallShape, args: argparse.Namespace) -> dict[str, Call]:
    """Every backend that takes the call, and our kernels as users call them."""
    q, k, v = synthetic(shape, device=args.device, distribution="biased")
    prologue = prologue_of(shape, args.device) if args.prologue else {}

    def plain() -> torch.Tensor:
        before = rotated(q, k, **prologue) if prologue else (q, k)
        return F.scaled_dot_product_attention(*before, v, is_causal=shape.causal)

    calls: dict[str, Call] = {}
    for name, backend in BACKENDS.items():

        def by_backend(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return plain()

        try:
            by_backend()
        except RuntimeError:
            continue
        calls[name] = by_backend
    calls["sdpa"] = plain  # torch's own choice, without the switch
    for label in args.kernels:
        kernel, variant = dispatch.parse_kernel(label)
        calls[label] = functools.partial(
            sage_plugin.attention, q, k, v, is_causal=shape.causal, kernel=kernel, variant=variant,
            **prologue,
        )  # fmt: skip
    return calls


def prologue_of(shape: CallShape, device: str) -> Facts:
    """An RMS norm for each head of Q and K, and a rotary embedding, as arguments of `attention`."""
    half = shape.head_dim // 2
    angles = torch.arange(shape.seq_q)[:, None] / 10_000 ** (torch.arange(half) / half)
    weight = torch.ones(shape.head_dim, device=device, dtype=getattr(torch, shape.dtype))
    norm = sage_plugin.QkNorm("rms", weight, eps=1e-6)
    cos, sin = (x.to(device) for x in (angles.cos(), angles.sin()))
    rope = sage_plugin.Rope(cos, sin, interleaved=False)
    return {"rope": rope, "q_norm": norm, "k_norm": norm}


def rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    rope: sage_plugin.Rope,
    q_norm: sage_plugin.QkNorm,
    k_norm: sage_plugin.QkNorm,
) -> tuple[torch.Tensor, ...]:
    """Q and K by torch's operations, as the eager code of models does it."""
    cos, sin = (torch.cat([x, x], -1) for x in (rope.cos, rope.sin))
    found = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        x = F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        low, high = x.chunk(2, -1)
        turned = torch.cat([-high, low], -1)
        found.append((x.float() * cos + turned.float() * sin).to(x.dtype))
    return tuple(found)


def cell(shape: CallShape, args: argparse.Namespace) -> Facts:
    """All variants of one size, by both methods."""
    calls, facts = calls_of(shape, args), devices.facts(args.device)
    for once in [*calls.values()] * 3:  # builds and recordings are no part of the budget
        once()
    found: Facts = {"shape": shape.to_json(), "us": {}, "ratio": {}}
    found["ran"] = {one: launch_of(one, shape, facts)[0].label for one in args.kernels}
    found["auto"] = dispatch.decide(shape, facts).label
    for name, method in METHODS.items():
        samples = measure(
            calls, device=args.device, method=method, budget_s=args.budget, min_samples=5,
            warmup=2, cold_l2=False,
        )  # fmt: skip
        us = {one: 1e3 * statistics.median(samples[one].ms) for one in calls}
        best = min(value for one, value in us.items() if one.startswith("sdpa"))
        found["us"][name] = us
        found["ratio"][name] = {one: best / us[one] for one in args.kernels}
    return found


def line_of(found: Facts) -> str:
    """One size as a line of the table."""
    shape = found["shape"]
    size = f"D{shape['head_dim']:<4d}H{shape['heads_q']:<4d}S{shape['seq_q']:<6d}"
    ratios = "  ".join(
        f"{name} " + " ".join(f"{one} x{ratio:.2f}" for one, ratio in ratios.items())
        for name, ratios in found["ratio"].items()
    )
    return f"{size} {ratios}  auto {found['auto']}"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--kernels", type=kernels, default=list(OURS))
    add("--head-dims", type=numbers, default=[64, 128])
    add("--heads", type=numbers, default=list(HEADS))
    add("--lengths", type=numbers, default=list(LENGTHS))
    add("--causal", action="store_true")
    add("--prologue", action="store_true", help="norm and rotary embedding of Q and K too")
    add("--budget", type=positive, default=0.25, help="seconds of timing a size and method")
    args = parser.parse_args(argv)
    return on_gpu(parser, args, "a CPU's times say nothing")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sizes and write one JSON file."""
    args = parsed(argv)
    cells: list[Facts] = []
    for dim in args.head_dims:
        for heads in args.heads:
            for length in args.lengths:
                shape = self_attention(1, heads, length, dim)
                shape = dataclasses.replace(shape, causal=args.causal)
                cells.append(cell(shape, args))
                print(line_of(cells[-1]), flush=True)
    found = {"prologue": args.prologue, "cells": cells}
    write(args.output, identity(args.device, args.commit) | found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
