"""How long the search of a policy takes on 10, 100 and 1,000 captures of the embedded model.

Each folder is recorded anew, from runs of as many denoising steps as that takes; every capture is
judged, on one head of each batch item.

    python benchmarks/search_time.py --output search_time.json [--captures 10 100 1000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer_kernels
import torch
from accuracy import identity, write
from gpu_options import gpu_parser, on_gpu

import sage_plugin
from sage_plugin.demo import load_pipeline
from sage_plugin.tune.policy.request import PolicyRequest
from sage_plugin.tune.policy.search import search

DIGIT = 7
LAYERS = 4
"""Attention layers of the embedded model."""


def timed(count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Record and search once."""
    steps = max(15, -(-count // LAYERS))
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        captures = Path(folder) / "captures"
        pipe = load_pipeline(device=args.device, dtype=torch.bfloat16)
        pipe.set_progress_bar_config(disable=True)
        start = time.monotonic()
        with sage_plugin.record(
            pipe, captures, max_captures=count, total_steps=steps, heads=1, max_bytes=64 * 2**30
        ):
            pipe(
                DIGIT,
                "large",
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(0),
            )
        recorded_s = time.monotonic() - start
        found = search(
            PolicyRequest(
                captures, max_error=args.max_error, captures_per_cell=count,
                runs_dir=Path(folder) / "runs",
            )
        )  # fmt: skip
        size = sum(path.stat().st_size for path in captures.iterdir())
    row = {
        "captures": found.judged,
        "bytes": size,
        "cells": len(found.grid.cells),
        "recorded_s": recorded_s,
        "searched_s": found.seconds,
    }
    print(row, flush=True)
    return row


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--captures", type=int, nargs="+", default=[10, 100, 1000])
    add("--max-error", type=float, default=0.03)
    add("--scratch", type=Path, help="folder for the captures, which are deleted")
    return on_gpu(parser, parser.parse_args(argv), "its times are what this is about")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write, row by row."""
    args = parsed(argv)
    nobody = peer_kernels.Found((), {}, ())
    body = identity(args.device, nobody, args.commit)
    rows: list[dict[str, Any]] = []
    for count in args.captures:
        rows.append(timed(count, args))
        write(args.output, body | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
