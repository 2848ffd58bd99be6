"""Our kernels beside their peers on one GPU: everything interleaved in one run, error beside speed.

Peers that are not installed are left out: SageAttention 1.0.6 (`pip install sageattention==1.0.6`),
torch's flash and cuDNN backends. Times are milliseconds with quantisation; `kernel_ms` is the
attention launch alone. Errors are against fp32 attention on rows sampled from every head, beside
the same error of the kernel's own emulation on those rows.

    python benchmarks/peers.py --output peers.json [--presets cogvideox-2b,...] [--budget 8]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.kernels import dispatch
from sage_plugin.kernels.attention.implementations import implementation
from sage_plugin.kernels.contract import Problem
from sage_plugin.kernels.oracle import oracle
from sage_plugin.measure.inputs import presets, synthetic
from sage_plugin.measure.timing import Samples, measure
from sage_plugin.schema import CallShape, LaunchConfig

if TYPE_CHECKING:
    from torch.nn.attention import SDPBackend

OURS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], object]


def backend(which: SDPBackend, tensors: Tensors) -> Call:
    """SDPA on one of torch's backends."""
    from torch.nn.attention import sdpa_kernel

    def call() -> torch.Tensor:
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(*tensors)

    return call


def peers(tensors: Tensors) -> dict[str, Call]:
    """Calls of the peers that run here."""
    from torch.nn.attention import SDPBackend

    found = {
        "sdpa flash": backend(SDPBackend.FLASH_ATTENTION, tensors),
        "sdpa cudnn": backend(SDPBackend.CUDNN_ATTENTION, tensors),
    }
    try:
        from sageattention.core import sageattn

        # SageAttention 1 subtracts the mean of K in place: it gets its own copy.
        q, k, v = tensors[0], tensors[1].clone(), tensors[2]
        found["sageattention 1.0.6"] = lambda: sageattn(q, k, v)
    except ImportError:
        pass
    return {name: call for name, call in found.items() if runs(name, call)}


def runs(name: str, call: Call) -> bool:
    """Whether a peer takes the call here."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} left out: {str(error)[:100]}")
        return False
    return True


def relative_l1(
    out: torch.Tensor, reference: torch.Tensor, mean: torch.Tensor
) -> tuple[float, float]:
    """Relative L1, plain and centred by the mean of V."""
    error = (out.double() - reference.double()).abs().sum()
    plain = reference.double().abs().sum()
    centred = (reference.double() - mean.double()).abs().sum()
    return (error / plain).item(), (error / centred).item()


def judge(
    kernel: str, config: LaunchConfig, tensors: Tensors, rows: torch.Tensor
) -> dict[str, float]:
    """Error of the portable kernel and of its emulation on sampled rows of every head."""
    q, k, v = tensors
    exact, _ = oracle(q, k, v, rows=rows)
    mean = v.float().mean(2, keepdim=True)
    full = sage_plugin.attention(q, k, v, kernel=kernel, out_dtype=torch.float32, launch=config)
    again = sage_plugin.attention(q, k, v, kernel=kernel, out_dtype=torch.float32, launch=config)
    twin = implementation(kernel, "emulation")
    problem = Problem(1.0 / math.sqrt(q.shape[3]), False, "bhsd")
    prepared = twin.prepare(q[:, :, rows], k, v, problem=problem, launch=config)
    emulated, _ = twin.launch(prepared, out_dtype=torch.float32)
    ours, ours_centred = relative_l1(full[:, :, rows], exact, mean)
    theirs, theirs_centred = relative_l1(emulated, exact, mean)
    return {
        "rel_l1": ours,
        "centred_rel_l1": ours_centred,
        "emulation_rel_l1": theirs,
        "emulation_centred_rel_l1": theirs_centred,
        "ratio_to_emulation": ours_centred / max(theirs_centred, 1e-12),
        "finite": bool(torch.isfinite(full).all()),
        "deterministic": bool(torch.equal(full, again)),
    }


def configs_of(kernel: str, shape: CallShape, search: bool) -> list[LaunchConfig]:
    """The config that a call would get, or the whole search space with it in front."""
    facts = devices.facts("cuda")
    key = dispatch.call_key(shape, dispatch.Decision(kernel, "portable"))
    found = dispatch.find_launch(key, facts).config
    if not search:
        return [found]
    return [found, *(c for c in dispatch.candidates(key, facts) if c != found)]


def kernel_call(kernel: str, config: LaunchConfig, tensors: Tensors) -> Call:
    """The attention launch alone, on operands prepared once."""
    q, k, v = tensors
    built = implementation(kernel, "portable")
    problem = Problem(1.0 / math.sqrt(q.shape[3]), False, "bhsd")
    operands = built.prepare(q, k, v, problem=problem, launch=config)
    return lambda: built.launch(operands)


def row(name: str, shape: CallShape, flops: float, samples: Samples) -> dict[str, Any]:
    """One line of the table."""
    timing = samples.timing()
    return {
        "preset": name,
        "variant": samples.name,
        "ms": timing.median_ms,
        "low_ms": timing.low_ms,
        "high_ms": timing.high_ms,
        "n": timing.n,
        "tflops": flops / timing.median_ms / 1e9,
    }


def run_preset(name: str, shape: CallShape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge, then time everything of one preset interleaved."""
    tensors = synthetic(shape, device="cuda", distribution="biased")
    rows = torch.randperm(
        shape.seq_q, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    rows = rows[: args.rows].sort().values
    calls: dict[str, Call] = peers(tensors)
    errors: dict[str, dict[str, float]] = {}
    for kernel in args.kernels.split(","):
        for config in configs_of(kernel, shape, args.search):
            label = f"{kernel} {config.text()}" if args.search else kernel
            try:
                errors[label] = judge(kernel, config, tensors, rows)
            except Exception as error:
                print(f"{label} failed: {str(error)[-200:]}")
                continue
            calls[label] = lambda k=kernel, c=config: sage_plugin.attention(
                *tensors, kernel=k, launch=c
            )
            if not args.search:
                calls[f"{kernel} kernel alone"] = kernel_call(kernel, config, tensors)
    samples = measure(calls, device="cuda", budget_s=args.budget, min_samples=5, warmup=1)
    flops = 4.0 * shape.batch * shape.heads_q * shape.seq_q * shape.seq_k * shape.head_dim
    table = [row(name, shape, flops, s) | errors.get(s.name, {}) for s in samples.values()]
    for line in sorted(table, key=lambda r: r["ms"]):
        print(
            f"{name:14s} {line['tflops']:7.1f} TFLOPS {line['ms']:8.3f} ms  "
            f"centred {line.get('centred_rel_l1', float('nan')):.4f} "
            f"x{line.get('ratio_to_emulation', float('nan')):.3f} {line['variant'][:150]}",
            flush=True,
        )
    return table


def main() -> None:
    """Run all presets and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--presets", default=",".join(presets()))
    parser.add_argument("--kernels", default=",".join(OURS))
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of timing a preset")
    parser.add_argument("--rows", type=int, default=64, help="rows judged in every head")
    parser.add_argument("--search", action="store_true", help="every config of the space")
    args = parser.parse_args()
    table = []
    for name in args.presets.split(","):
        table += run_preset(name, presets()[name], args)
        torch.cuda.empty_cache()
    facts, chain = devices.facts("cuda"), devices.toolchain()
    identity = {"device": facts.to_json(), "toolchain": chain.to_json(), "rows": table}
    args.output.write_text(json.dumps(identity, indent=1) + "\n")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
