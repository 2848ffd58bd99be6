"""Our kernels beside their peers on one GPU: everything interleaved in one run, error beside speed.

Peers that are not installed are left out: torch's flash and cuDNN backends, FlashAttention-3
(`pip install fa3-fwd`, bf16 and FP8), SageAttention (`pip install sageattention==1.0.6`, or 2),
comfy-kitchen's int8_attention and flash-attn-4. Times are milliseconds with quantisation; "kernel
alone" is the attention launch on operands prepared once. Errors are against fp32 attention on rows
sampled from every head: of our fp32 output, beside that of the kernel's own emulation, and of the
peers' outputs in their own dtype.

    python benchmarks/peers.py --output peers.json [--presets cogvideox-2b,...] [--budget 8]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import peer_kernels
import torch
from accuracy import (
    FP32,
    SMALLEST,
    Tensors,
    built,
    emulated,
    errors_of,
    identity,
    kernels,
    launch_of,
    twin_rows,
    write,
)
from gpu_options import gpu_parser, on_gpu, positive

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.families.attention.reference import clear, reference
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.measure.clocks import ClockSnapshot, snapshot, stamp
from sage_plugin.measure.inputs import presets, synthetic
from sage_plugin.measure.timing import Samples, measure
from sage_plugin.schema import CallShape, LaunchConfig
from sage_plugin.tune.search.search import RECIPE

OURS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
AGAIN = " again"

Call = Callable[[], object]
Facts = dict[str, Any]


def judge_ours(
    kernel: str,
    decision: dispatch.Decision,
    config: LaunchConfig,
    tensors: Tensors,
    args: argparse.Namespace,
) -> Facts:
    """Error of a kernel and of its emulation on sampled rows of every head."""
    q, k, v = tensors
    scale = 1.0 / math.sqrt(q.shape[3])
    rows = twin_rows(q.shape[2], count=args.rows, granule=config.q_granule, causal=False)
    exact = reference(q, k, v, rows=rows)

    def run() -> torch.Tensor:
        out = sage_plugin.attention(
            q, k, v, kernel=decision.kernel, variant=decision.variant, launch=config,
            out_dtype=FP32,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    full, again = run(), run()
    own = errors_of(full[:, :, exact.rows], exact.out, exact.mean, v.dtype)
    twin = emulated(decision.kernel, config, tensors, exact.rows, causal=False, scale=scale)
    theirs = errors_of(twin, exact.out, exact.mean, v.dtype)
    return {
        "kernel": kernel,
        "ran": decision.label,
        "launch": config.to_json(),
        "rel_l1": own["rel_l1"],
        "centred_rel_l1": own["centred_rel_l1"],
        "emulation_rel_l1": theirs["rel_l1"],
        "emulation_centred_rel_l1": theirs["centred_rel_l1"],
        "ratio_to_emulation": own["centred_rel_l1"] / max(theirs["centred_rel_l1"], SMALLEST),
        "gain": own["gain"],
        "finite": bool(torch.isfinite(full).all()),
        "deterministic": bool(torch.equal(full, again)),
    }


def judge_peer(call: peer_kernels.Run, tensors: Tensors, args: argparse.Namespace) -> Facts:
    """Error of a peer's output in its own dtype; it raises where the peer cannot take the call."""
    q, k, v = tensors
    rows = twin_rows(q.shape[2], count=args.rows, granule=1, causal=False)
    exact = reference(q, k, v, rows=rows)
    out = call()
    errors = errors_of(out[:, :, exact.rows].float(), exact.out, exact.mean, out.dtype)
    wanted = ("rel_l1", "centred_rel_l1", "gain", "rounding_floor")
    return {
        "out_dtype": str(out.dtype).removeprefix("torch."),
        **{name: errors[name] for name in wanted},
        "finite": bool(torch.isfinite(out).all()),
    }


def peers_ready(
    found: peer_kernels.Found, tensors: Tensors, args: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, Facts]]:
    """Calls of the peers that take these tensors, and their errors."""
    calls: dict[str, Call] = {}
    facts: dict[str, Facts] = {}
    scale = 1.0 / math.sqrt(tensors[0].shape[3])
    for peer in found.peers:
        try:
            call = peer.prepare(*tensors, causal=False, scale=scale)
            facts[peer.name] = judge_peer(call, tensors, args)
        except Exception as error:  # any peer may refuse any call in its own way
            print(f"{peer.name} left out: {peer_kernels.first_line(error)}")
            continue
        calls[peer.name] = call
    return calls, facts


def ours_ready(
    shape: CallShape, tensors: Tensors, args: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, Facts]]:
    """Calls of our kernels, with quantisation and alone, and their errors."""
    calls: dict[str, Call] = {}
    facts: dict[str, Facts] = {}
    for kernel in args.kernels:
        for decision, config in configs_of(kernel, shape, args):
            label = f"{kernel} {config.text()}" if args.search else kernel
            try:
                facts[label] = judge_ours(kernel, decision, config, tensors, args)
            except Exception as error:  # one config's failure must not end the table
                print(f"{label} failed: {str(error)[-200:]}")
                continue
            calls[label] = whole_call(decision, config, tensors)
            if not args.search:
                alone = f"{kernel} kernel alone"
                calls[alone] = kernel_call(decision, config, tensors)
                facts[alone] = {name: facts[label][name] for name in ("kernel", "ran", "launch")}
    return calls, facts


def configs_of(
    kernel: str, shape: CallShape, args: argparse.Namespace
) -> list[tuple[dispatch.Decision, LaunchConfig]]:
    """The config that a call would get, or the whole search space with it in front."""
    facts = devices.facts(args.device)
    decision, found = launch_of(kernel, shape, facts)
    every = dispatch.candidates(dispatch.call_key(shape, decision), facts) if args.search else ()
    recipe = operator.attrgetter(*RECIPE)  # those of other errors are not what is compared here
    others = (c for c in every if c != found and recipe(c) == recipe(found))
    return [(decision, config) for config in (found, *others)]


def whole_call(decision: dispatch.Decision, config: LaunchConfig, tensors: Tensors) -> Call:
    """One of our kernels with its quantisation, as users call it."""
    q, k, v = tensors
    return lambda: sage_plugin.attention(
        q, k, v, kernel=decision.kernel, variant=decision.variant, launch=config
    )


def kernel_call(decision: dispatch.Decision, config: LaunchConfig, tensors: Tensors) -> Call:
    """The attention launch alone, on operands prepared once."""
    q, k, v = tensors
    one = built(decision.kernel, decision.variant, q.device)
    problem = AttentionParams(1.0 / math.sqrt(q.shape[3]), False, "bhsd")
    operands = one.prepare(q, k, v, problem=problem, launch=config)
    return lambda: one.launch(operands)


def row(name: str, shape: CallShape, samples: Samples) -> Facts:
    """The timing of one line of the table."""
    timing = samples.timing()
    flops = 4.0 * shape.batch * shape.heads_q * shape.seq_q * shape.seq_k * shape.head_dim
    return {
        "preset": name,
        "variant": samples.name,
        "ms": timing.median_ms,
        "low_ms": timing.low_ms,
        "high_ms": timing.high_ms,
        "n": timing.n,
        "tflops": flops / timing.median_ms / 1e9,
    }


def trust(
    samples: Mapping[str, Samples],
    first: str,
    before: ClockSnapshot | None,
    after: ClockSnapshot | None,
) -> Facts:
    """The A/A test of a table, the clocks around it, and the stamp that they give it."""
    aa_ratio = statistics.median(samples[first + AGAIN].ms) / statistics.median(samples[first].ms)
    return {
        "stamp": stamp(aa_ratio, before, after),
        "aa": first,
        "aa_ratio": aa_ratio,
        "before": None if before is None else dataclasses.asdict(before),
        "after": None if after is None else dataclasses.asdict(after),
    }


def run_preset(
    name: str, shape: CallShape, found: peer_kernels.Found, args: argparse.Namespace
) -> tuple[Facts, list[Facts]]:
    """Judge, then time everything of one preset interleaved; how it went, and its rows."""
    tensors = synthetic(shape, device=args.device, distribution="biased")
    calls, facts = ours_ready(shape, tensors, args)
    their_calls, their_facts = peers_ready(found, tensors, args)
    first = next(itertools.chain(calls, their_calls))
    calls |= their_calls
    facts |= their_facts
    before = snapshot(args.device)
    samples = measure(
        {**calls, first + AGAIN: calls[first]},
        device=args.device, budget_s=args.budget, min_samples=5, warmup=1,
    )  # fmt: skip
    after = snapshot(args.device)
    how = {"preset": name, "shape": shape.to_json(), **trust(samples, first, before, after)}
    table = [row(name, shape, samples[label]) | facts[label] for label in calls]
    for line in sorted(table, key=lambda r: r["ms"]):
        print(line_of(line))
    print(f"{name:14s} {how['stamp']}, A/A {how['aa_ratio']:.3f}, {clocks(after)}", flush=True)
    clear()
    return how, table


def line_of(line: Facts) -> str:
    """One row as a line of the table."""
    nothing = float("nan")
    return (
        f"{line['preset']:14s} {line['tflops']:7.1f} TFLOPS {line['ms']:8.3f} ms  "
        f"L1 {line.get('rel_l1', nothing):.5f} centred {line.get('centred_rel_l1', nothing):.4f} "
        f"x{line.get('ratio_to_emulation', nothing):.3f} {line['variant'][:150]}"
    )


def clocks(state: ClockSnapshot | None) -> str:
    """Clock and power in words."""
    if state is None:
        return "no clock readings"
    reasons = ", ".join(state.reasons) or "no limit"
    return f"{state.sm_mhz} MHz, {state.power_w} W, {state.temperature_c} C ({reasons})"


def preset_names(text: str) -> list[str]:
    """Names of presets, separated by commas."""
    unknown = [name for name in text.split(",") if name not in presets()]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: allowed are {', '.join(presets())}")
    return text.split(",")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--presets", type=preset_names, default=list(presets()))
    add("--kernels", type=kernels, default=list(OURS))
    add("--budget", type=positive, default=8.0, help="seconds of timing a preset")
    add("--rows", type=int, default=64, help="rows judged in every head")
    add("--search", action="store_true", help="every config of the space")
    args = parser.parse_args(argv)
    if args.rows < 1:
        parser.error("argument --rows: needs a number above zero")
    return on_gpu(parser, args, "a CPU's times say nothing")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run all presets and write one JSON file."""
    args = parsed(argv)
    found = peer_kernels.timed_peers()
    print(*found.left_out, sep="\n")
    tables, rows = [], []
    for name in args.presets:
        how, table = run_preset(name, presets()[name], found, args)
        tables.append(how)
        rows += table
        torch.cuda.empty_cache()
    write(args.output, identity(args.device, args.commit, found) | {"tables": tables, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
