"""What quantisation costs on a GPU, beside the time that its bytes take at the speed of a copy.

Both are replayed as CUDA graphs with a cold L2 cache. The floor counts 13 bytes for each value of
Q: Q, K and V read in 16 bits, K and V twice (means and extremes come first), three written in 8. As
in a call that does not ask for the LSE.

    python benchmarks/prepass.py --output prepass.json [--presets cogvideox-2b,...]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from accuracy import identity, kernels, write
from gpu_options import gpu_parser, on_gpu, positive
from peers import preset_names

import sage_plugin
from sage_plugin.kernels.attention import dispatch
from sage_plugin.measure.inputs import presets, synthetic
from sage_plugin.measure.timing import measure
from sage_plugin.schema import CallShape

KERNELS = ("fav3_sage", "fav3_fp8")
LAYOUTS = ("bhsd", "bshd")
COPIED_BYTES = 2**29
FLOOR_BYTES = 13

Facts = dict[str, Any]


def copy_rate(device: str, budget_s: float) -> float:
    """Bytes a second that a large copy reads and writes, both counted."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = {"copy": functools.partial(target.copy_, source)}
    samples = measure(copy, device=device, budget_s=budget_s, min_samples=5, cold_l2=False)
    return 2 * COPIED_BYTES / (statistics.median(samples["copy"].ms) * 1e-3)


def floor_us(shape: CallShape, rate: float) -> float:
    """Microseconds that the bytes of a call's quantisation take; 9 of 13 are of keys and values."""
    of_queries = shape.batch * shape.heads_q * shape.seq_q * shape.head_dim
    of_keys = shape.batch * shape.heads_k * shape.seq_k * shape.head_dim
    return 1e6 * (3 * of_queries + (FLOOR_BYTES - 3) * of_keys) / rate


def rows(name: str, shape: CallShape, rate: float, args: argparse.Namespace) -> list[Facts]:
    """One preset: every kernel and layout, interleaved."""
    calls = {}
    for layout in LAYOUTS:
        here = dataclasses.replace(shape, layout=layout)
        q, k, v = synthetic(here, device=args.device, distribution="biased")
        if layout == "bshd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        for label in args.kernels:
            kernel, variant = dispatch.parse_kernel(label)
            calls[label, layout] = functools.partial(
                sage_plugin.prepare, q, k, v, kernel=kernel, variant=variant, layout=layout,
                with_lse=False,
            )  # fmt: skip
    named = {" ".join(key): call for key, call in calls.items()}
    samples = measure(
        named, device=args.device, method=args.method, budget_s=args.budget, min_samples=5
    )
    floor = floor_us(shape, rate)
    found = []
    for label, layout in calls:
        us = 1e3 * statistics.median(samples[f"{label} {layout}"].ms)
        n = len(samples[f"{label} {layout}"].ms)
        found.append(
            {"preset": name, "shape": shape.to_json(), "kernel": label, "layout": layout, "us": us,
             "n": n, "floor_us": floor, "ratio": us / floor}
        )  # fmt: skip
    return found


def line_of(row: Facts) -> str:
    """One row as a line of the table."""
    return (
        f"{row['preset']:14s} {row['kernel']:10s} {row['layout']} {row['us']:7.1f} us, "
        f"floor {row['floor_us']:6.1f} x{row['ratio']:.2f}"
    )


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--presets", type=preset_names, default=list(presets()))
    add("--kernels", type=kernels, default=list(KERNELS))
    add("--budget", type=positive, default=2.0, help="seconds of timing a preset")
    args = parser.parse_args(argv)
    args.method = "graph"
    return on_gpu(parser, args, "a CPU's times say nothing")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure all presets and write one JSON file."""
    args = parsed(argv)
    rate = copy_rate(args.device, args.budget)
    print(f"a copy moves {rate / 1e12:.2f} TB/s")
    table: list[Facts] = []
    for name in args.presets:
        made = rows(name, presets()[name], rate, args)
        table += made
        print("\n".join(map(line_of, made)), flush=True)
    facts = identity(args.device, args.commit)
    write(args.output, facts | {"copy_bytes_per_s": rate, "rows": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
