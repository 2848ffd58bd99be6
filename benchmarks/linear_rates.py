"""Linears of models on a GPU: torch's 16-bit product, ours with quantization, and each part alone.

All ways to compute one linear are timed interleaved with a cold L2 cache. With torchao installed,
its dynamic FP8 rows stand beside ours, compiled as its users run it.

    python benchmarks/linear_rates.py --output linear_rates.json [--linears flux,wan-14b]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accuracy import identity, write
from gpu_options import beginnings, gpu_parser, on_gpu, positive

from sage_plugin import device
from sage_plugin.families import LINEAR_FAMILY
from sage_plugin.families.linear.replay import LinearReplay, drawn
from sage_plugin.kernels.linear.api import apply
from sage_plugin.kernels.linear.rows.prologue import Prologue
from sage_plugin.kernels.linear.weight import quantize_weight
from sage_plugin.measure.timing import measure
from sage_plugin.schema import LinearShape

SHAPES = {
    "cogvideox-2b qkv": (35552, 1920, 1920), "cogvideox-2b ff up": (35552, 1920, 7680),
    "cogvideox-2b ff down": (35552, 7680, 1920), "cogvideox-5b ff up": (35552, 3072, 12288),
    "wan-1.3b qkv": (32760, 1536, 1536), "wan-1.3b ff up": (32760, 1536, 8960),
    "wan-1.3b ff down": (32760, 8960, 1536), "wan-14b qkv": (32760, 5120, 5120),
    "wan-14b ff up": (32760, 5120, 13824), "wan-14b ff down": (32760, 13824, 5120),
    "flux qkv": (4608, 3072, 3072), "flux ff up": (4608, 3072, 12288),
    "flux ff down": (4608, 12288, 3072), "flux single out": (4608, 15360, 3072),
    "llm prefill": (2048, 4096, 28672), "llm decode": (16, 4096, 28672),
}  # fmt: skip
"""Rows, channels in and channels out, by model and linear."""

KERNELS = ("fp8_row", "int8_row")
GELU = Prologue("gelu_tanh")

Facts = dict[str, Any]
Calls = dict[str, Callable[[], object]]


def calls_of(call: LinearReplay, kernels: Sequence[str]) -> Calls:
    """The ways to compute one linear, by name."""
    x, weight, bias = call.x, call.weight, call.bias
    linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu

    def after_gelu() -> torch.Tensor:
        return linear(gelu(x, approximate="tanh"), weight, bias)

    found: Calls = {"bf16": lambda: linear(x, weight, bias), "gelu, bf16": after_gelu}
    facts = device.facts(x.device)
    for kernel in kernels:
        decision = LINEAR_FAMILY.decide(call.shape, facts, kernel=kernel)
        parts = call.split(decision, None, facts)
        found |= {kernel: parts.whole, f"{kernel} alone": parts.alone}
        quantized = quantize_weight(weight, kernel)
        found[f"gelu, {kernel}"] = functools.partial(apply, x, quantized, bias, prologue=GELU)
    if importlib.util.find_spec("torchao") is not None:
        found["torchao"] = _torchao(call)
    return found


def _torchao(call: LinearReplay) -> Callable[[], object]:
    """A compiled layer with torchao's dynamic FP8 rows."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    out, channels = call.weight.shape
    layer = torch.nn.Linear(channels, out, device=call.x.device, dtype=call.x.dtype)
    layer.load_state_dict({"weight": call.weight, "bias": call.bias})
    quantize_(layer, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    torch._dynamo.reset()  # after eight layers of other shapes it would compile no more
    compiled = torch.compile(layer)
    return lambda: compiled(call.x)


def row(name: str, args: argparse.Namespace) -> Facts:
    """One linear: milliseconds and rate of each way."""
    rows, channels, out = SHAPES[name]
    shape = LinearShape(rows, channels, out, "bfloat16", bias=True)
    call = drawn(shape, args.device)
    calls = calls_of(call, args.kernels)
    for once in calls.values():  # builds are no part of the budget
        once()
    samples = measure(
        calls, device=args.device, method=args.method, budget_s=args.budget, min_samples=5
    )
    ms = {name: statistics.median(taken.ms) for name, taken in samples.items()}
    n = {name: len(taken.ms) for name, taken in samples.items()}
    tflops = {name: call.flops() / value * 1e-9 for name, value in ms.items()}
    return {"linear": name, "shape": shape.to_json(), "ms": ms, "n": n, "tflops": tflops}


def line_of(found: Facts) -> str:
    """One linear as a line of the table."""
    base = found["ms"]["bf16"]
    cells = [
        f"{name} {found['tflops'][name]:.0f} ({base / value:.2f}x)"
        for name, value in found["ms"].items()
        if not name.startswith("gelu")
    ]
    return f"{found['linear']:20s} TFLOPS: {', '.join(cells)}"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--linears", type=beginnings(SHAPES), default=list(SHAPES), help="beginnings of names")
    add("--budget", type=positive, default=2.0, help="seconds of timing a linear")
    args = parser.parse_args(argv)
    args.method, args.kernels = "events", KERNELS
    return on_gpu(parser, args, "a CPU's times say nothing")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure all linears and write one JSON file."""
    args = parsed(argv)
    table = []
    for name in args.linears:
        table.append(row(name, args))
        print(line_of(table[-1]), flush=True)
        torch.cuda.empty_cache()
    write(args.output, identity(args.device, args.commit) | {"rows": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
