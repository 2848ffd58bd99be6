"""Experts of mixtures on a GPU: torch's grouped products, and ours with quantization and alone.

All ways to compute one grouped linear are timed interleaved with a cold L2 cache, with rows spread
evenly over the experts and by Zipf's law. `tokens, bf16` gathers the rows of tokens first, as the
stock path does; `tokens, fp8_row` quantizes each token once into all of its rows.

    python benchmarks/grouped_rates.py --output grouped_rates.json [--models mixtral,qwen3-30b]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accuracy import identity, write
from gpu_options import beginnings, gpu_parser, on_gpu, positive

from sage_plugin import device
from sage_plugin.families import GROUPED_LINEAR_FAMILY
from sage_plugin.families.grouped_linear.replay import GroupedReplay, drawn
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall
from sage_plugin.kernels.grouped_linear.executor import run
from sage_plugin.kernels.grouped_linear.weight import quantize_weights
from sage_plugin.kernels.linear.quantizer import quantizer_of
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.measure.timing import measure
from sage_plugin.schema import LinearShape


class Mixture(NamedTuple):
    """The experts of a model's layer: how many, those of a token, channels outside and inside."""

    experts: int
    choices: int
    hidden: int
    inner: int


MODELS = {
    "mixtral-8x7b": Mixture(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Mixture(128, 8, 2048, 768),
    "qwen3-235b-a22b": Mixture(128, 8, 4096, 1536),
    "deepseek-v3, a quarter": Mixture(64, 2, 7168, 2048),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880),
    "olmoe-7b": Mixture(64, 8, 2048, 1024),
    "phi-3.5-moe": Mixture(16, 2, 4096, 6400),
    "qwen2-57b-a14b": Mixture(64, 8, 3584, 2560),
}
TOKENS = (16, 256, 4096, 16384)
ROUTINGS = {"even": "normal", "skewed": "skewed"}
"""How rows are spread, and the distribution of drawn inputs that has it."""

KERNELS = ("bf16", "fp8_row", "int8_row")

Facts = dict[str, Any]
Calls = dict[str, Callable[[], object]]


def calls_of(call: GroupedReplay, choices: int, kernels: Sequence[str]) -> Calls:
    """The ways to compute one grouped linear, by name."""
    facts = device.facts(call.x.device)
    found: Calls = {"torch": call.whole()}
    if facts.kind != "cpu":
        scaled = Decision("fp8_row", "torch")
        found["torch fp8 alone"] = call.split(scaled, None, facts).alone
    for kernel in kernels:
        decision = GROUPED_LINEAR_FAMILY.decide(call.shape, facts, kernel=kernel)
        parts = call.split(decision, None, facts)
        found[kernel] = parts.whole
        if parts.quantizes:
            found[f"{kernel} alone"] = parts.alone
    return found | _of_tokens(call, choices)


def _of_tokens(call: GroupedReplay, choices: int) -> Calls:
    """The same from tokens, each of which has several rows."""
    rows, where = call.shape.rows, call.x.device
    tokens = call.x[: rows // choices]
    order = torch.randperm(rows, device=where)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(rows, dtype=torch.int32, device=where)
    places = places.view(-1, choices)
    weights, sizes = call.weight, call.group_sizes
    quantized, quantize = quantize_weights(weights, "fp8_row"), quantizer_of(where)

    def stock() -> torch.Tensor:
        ends = torch.cumsum(sizes, 0, dtype=torch.int32)
        gathered = tokens[order // choices]
        return torch.nn.functional.grouped_mm(gathered, weights.transpose(1, 2), offs=ends)

    def ours() -> torch.Tensor:
        made = quantize(tokens, quantized.row_format, copies=places)
        product = GroupedLinearCall(made, quantized, sizes, None, call.dtype)
        return run(product, BackendRequest())

    return {"tokens, bf16": stock, "tokens, fp8_row": ours}


def row(name: str, tokens: int, routing: str, args: argparse.Namespace) -> Facts:
    """The first product of a model's experts: milliseconds and rate of each way."""
    mixture = MODELS[name]
    shape = LinearShape(
        tokens * mixture.choices, mixture.hidden, 2 * mixture.inner, "bfloat16",
        groups=mixture.experts,
    )  # fmt: skip
    call = drawn(shape, args.device, 0, ROUTINGS[routing])
    calls = calls_of(call, mixture.choices, args.kernels)
    for once in calls.values():  # builds are no part of the budget
        once()
    samples = measure(
        calls, device=args.device, method=args.method, budget_s=args.budget, min_samples=5
    )
    ms = {way: statistics.median(taken.ms) for way, taken in samples.items()}
    sizes = call.group_sizes
    return {
        "model": name, "tokens": tokens, "routing": routing, "shape": shape.to_json(), "ms": ms,
        "n": {way: len(taken.ms) for way, taken in samples.items()},
        "tflops": {way: call.flops() / value * 1e-9 for way, value in ms.items()},
        "largest_group": int(sizes.max()), "empty_groups": int((sizes == 0).sum()),
    }  # fmt: skip


def line_of(found: Facts) -> str:
    """One row as a line of the table."""
    ms, cells = found["ms"], []
    for way, value in ms.items():
        base = ms["tokens, bf16" if way.startswith("tokens") else "torch"]
        cells.append(f"{way} {found['tflops'][way]:.0f} ({base / value:.2f}x)")
    return f"{found['model']:22s} {found['tokens']:6d} {found['routing']:6s} {', '.join(cells)}"


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rows and write one JSON file."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--models", type=beginnings(MODELS), default=list(MODELS), help="beginnings of names")
    add("--budget", type=positive, default=1.0, help="seconds of timing a row")
    args = on_gpu(parser, parser.parse_args(argv), "a CPU's times say nothing")
    args.method, args.kernels = "events", KERNELS
    table = []
    for name in args.models:
        for tokens in TOKENS:
            for routing in ROUTINGS:
                table.append(row(name, tokens, routing, args))
                print(line_of(table[-1]), flush=True)
                torch.cuda.empty_cache()
    write(args.output, identity(args.device, args.commit) | {"rows": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
