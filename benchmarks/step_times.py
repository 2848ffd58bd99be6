"""A denoising step of full-size video and image models with random weights, unpatched and patched.

Each model is built from its configuration, so that nothing is downloaded; a step is one forward of
its transformer at the usual size. The variants take turns; compiled ones have each of their blocks
compiled by itself, as `compile_repeated_blocks` does, and are compared with the compiled unpatched
one.

    python benchmarks/step_times.py --output step_times.json [--models flux-dev-1024,...]
        [--kernels auto,auto+fp8_row] [--layers 8] [--compiled]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import step_models
import step_timing
import torch
from accuracy import identity, kernels, write
from gpu_options import gpu_parser, on_gpu, positive
from step_peers import PEERS

Facts = dict[str, Any]

LINEARS = ("auto", "fp8_row", "int8_row", "fp8_tensor")

GRAPHS = 64
"""Of a block: each variant has its own, where a user has one."""


def measured(name: str, args: argparse.Namespace) -> Facts:
    """Times of one model."""
    torch._dynamo.reset()
    step = step_models.build(name, torch.device(args.device), tiny=args.tiny, layers=args.layers)
    times = step_timing.time_steps(
        step.model, step.arguments, args.kernels, min_seq=0 if args.tiny else 1024,
        budget_s=args.budget, compiled=args.compiled, config_dir=args.config_dir,
    )  # fmt: skip
    facts = {"model": name, "tokens": step.tokens, "config": step.config, **times.to_json()}
    print(*lines_of(facts), sep="\n", flush=True)
    return facts


def lines_of(facts: Facts) -> list[str]:
    """The times of a model as text."""
    lines = [f"{facts['model']}: {facts['tokens']} tokens, {facts['stamp']}"]
    for row in facts["rows"]:
        if row["time"] is None:
            continue
        ratio = "" if row["ratio"] is None else f"  x{row['ratio']:.3f}"
        memory = row["peak_memory_bytes"]
        held = "" if memory is None else f"  {memory / 2**30:.2f} GiB"
        lines.append(
            f"  {row['name']:24} {row['time']['median_ms']:9.2f} ms{ratio}{held}  "
            f"{row['kernel_calls']} of {row['attention_calls']} calls on a kernel"
            + (f", {sum(row['linear_calls'].values())} linears" if row["linear_calls"] else "")
        )
    return lines


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--models", type=models, default=list(step_models.MODELS))
    add(
        "--kernels",
        type=kernels_and_linears,
        default=["auto", "auto+fp8_row"],
        help="kernels of attention, each with +KERNEL for the linears too, or " + ", ".join(PEERS),
    )
    add("--layers", type=int, help="at most so many blocks of each kind")
    add("--budget", type=positive, default=20.0, help="seconds of timing a model")
    add("--compiled", action="store_true", help="with compiled blocks too")
    add("--config-dir", help="folder of configs, to time each kernel with them too")
    add("--tiny", action="store_true", help="tiny models, for a CPU")
    args = parser.parse_args(argv)
    return on_gpu(parser, args, "a full-size step takes minutes on a CPU; try --tiny there")


def kernels_and_linears(text: str) -> list[str]:
    """Kernels of attention, each with one of linears behind a plus if there is one, or peers."""
    names = text.split(",")
    for name in names:
        if name in PEERS:
            continue
        attention, plus, linears = name.partition("+")
        kernels(attention)
        if plus and linears not in LINEARS:
            raise argparse.ArgumentTypeError(
                f"{name!r}: {linears!r} is no kernel of linears; choose from {', '.join(LINEARS)}"
            )
    return names


def models(text: str) -> list[str]:
    """Names of models, separated by commas."""
    names = text.split(",")
    for name in names:
        if name not in step_models.MODELS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no model; choose from {', '.join(step_models.MODELS)}"
            )
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; a model that fails costs its own row alone."""
    args = parsed(argv)
    torch._dynamo.config.recompile_limit = GRAPHS
    rows, failed = [], []
    for name in args.models:
        try:
            rows.append(measured(name, args))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
        write(
            args.output,
            identity(args.device, args.commit) | {"models": rows, "failed": failed},
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
