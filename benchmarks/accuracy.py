"""Error of our kernels beside their peers' on the same inputs, centred, at the same output dtype.

Each cell is one of our kernels against one peer on one input: SageAttention 1.0.6 against `sage`,
FA3-FP8 (`pip install fa3-fwd`; e4m3 inputs, one descale factor a batch item and key head) against
`fav3_sage` and `fav3_fp8`. The number is relative L1 of the output less the mean of V, on rows
sampled from every head. Peers that write fp32 are compared in fp32, the others with our fp32 output
rounded to their dtype. SDPA and FA3 bf16 stand beside them as references, and the kernel's own
emulation as the measure of its bugs. Peers that are not installed are left out.

    python benchmarks/accuracy.py --output accuracy.json [--captures FOLDER] [--tensors FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peer_kernels
import torch
from accuracy_inputs import (
    INPUTS,
    LONG_HEADS,
    LONG_SEQ,
    Case,
    Tensors,
    capture_cases,
    synthetic_cases,
    tensor_cases,
    trimmed,
)
from peer_kernels import Peer

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.accuracy.metrics import compare
from sage_plugin.accuracy.output import ExactRows as Reference
from sage_plugin.bench.report import finite
from sage_plugin.errors import SageError, UnsupportedInputError
from sage_plugin.families.attention.reference import clear, reference, sample_rows
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Implementation
from sage_plugin.schema import CallShape, DeviceFacts, LaunchConfig
from sage_plugin.tune.run.run_folder import git_revision

OURS = ("sage", "fav3_sage", "fav3_fp8")
SMALLEST = 1e-12
FP32 = torch.float32

Errors = dict[str, float]


@dataclass(frozen=True, slots=True)
class Judged:
    """What one of our kernels gave on one input.

    Attributes:
        out: its fp32 output on the judged rows.
        errors: of that.
        label: kernel and variant that ran.
        launch: launch config that it ran with.
        ratio_to_emulation: its error over its emulation's, on rows that the emulation has too.
    """

    out: torch.Tensor
    errors: Errors
    label: str
    launch: LaunchConfig
    ratio_to_emulation: float


# -- judging ----------------------------------------------------------------------------------


def errors_of(
    out: torch.Tensor, exact: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype
) -> Errors:
    """Error of an output, plain and centred, and what rounding to its dtype alone costs."""
    plain = compare(out, exact, v_mean=mean, rounding=dtype)
    center = mean.double()
    centered = compare(out.double() - center, exact.double() - center)
    return {
        "rel_l1": plain.rel_l1,
        "centred_rel_l1": plain.centred_rel_l1,
        "worst_head_rel_l1": plain.worst_head_rel_l1,
        "worst_head_centred_rel_l1": centered.worst_head_rel_l1,
        "cosine": plain.cosine,
        "centred_cosine": centered.cosine,
        "gain": plain.gain,
        "rounding_floor": plain.rounding_floor,
        "bad_values": float(plain.bad_values),
    }


def twin_rows(seq_q: int, *, count: int, granule: int, causal: bool, seed: int = 0) -> torch.Tensor:
    """Rows on which a kernel's emulation can be run alone: whole granules of the Q scale.

    Under a causal mask the last rows, since a suffix of Q is bottom-right aligned as all of it is.

    Example:
        >>> twin_rows(1000, count=100, granule=64, causal=True)[0].item()
        896
    """
    if seq_q <= max(count, granule):
        return torch.arange(seq_q)
    if causal:
        return torch.arange((seq_q - count) // granule * granule, seq_q)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(seq_q // granule, generator=generator)[: max(1, count // granule)]
    return (chosen.sort().values[:, None] * granule + torch.arange(granule)).flatten()


def built(kernel: str, variant: str, device: torch.device) -> Implementation[Any]:
    """The implementation of a kernel with the FP8 type of a device."""
    fp8 = devices.facts(device).fp8_dtype or "float8_e4m3fn"
    return implementation(kernel, variant, getattr(torch, fp8))


def emulated(
    kernel: str,
    launch: LaunchConfig,
    tensors: Tensors,
    rows: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Those rows of a kernel's emulation on the same device, in fp32."""
    q, k, v = tensors
    twin = built(kernel, "emulation", q.device)
    problem = AttentionParams(scale, causal, "bhsd")
    operands = twin.prepare(q[:, :, rows], k, v, problem=problem, launch=launch)
    out, _ = twin.launch(operands, out_dtype=FP32)
    return out


def launch_of(
    kernel: str, shape: CallShape, facts: DeviceFacts
) -> tuple[dispatch.Decision, LaunchConfig]:
    """The variant that a call runs on (`kernel` or `kernel:variant`), and its launch config.

    Raises:
        UnsupportedInputError: the kernel does not take this call on this device.
    """
    name, variant = dispatch.parse_kernel(kernel)
    decision = dispatch.decide(shape, facts, kernel=name, variant=variant)
    if decision.reason is not None:
        raise UnsupportedInputError(str(decision.reason))
    return decision, dispatch.find_launch(dispatch.call_key(shape, decision), facts).config


def judge_ours(
    kernel: str, shape: CallShape, tensors: Tensors, exact: Reference, args: argparse.Namespace
) -> Judged:
    """Run one of our kernels, and its emulation on some rows."""
    q, k, v = tensors
    decision, launch = launch_of(kernel, shape, devices.facts(q.device))
    full = sage_plugin.attention(
        q, k, v, is_causal=shape.causal, scale=shape.scale, enable_gqa=q.shape[1] != k.shape[1],
        kernel=decision.kernel, variant=decision.variant, launch=launch, out_dtype=FP32,
    )  # fmt: skip
    assert isinstance(full, torch.Tensor)
    out = full[:, :, exact.rows]
    errors = errors_of(out, exact.out, exact.mean, v.dtype)
    errors["bad_values"] = float((~torch.isfinite(full)).sum().item())
    rows = twin_rows(
        shape.seq_q, count=args.twin_rows, granule=launch.q_granule, causal=shape.causal
    )
    near = reference(q, k, v, causal=shape.causal, scale=shape.scale, rows=rows)
    twin = emulated(
        decision.kernel, launch, tensors, near.rows, causal=shape.causal, scale=shape.scale
    )
    own = compare(full[:, :, near.rows], near.out, v_mean=near.mean).centred_rel_l1
    twins = compare(twin, near.out, v_mean=near.mean).centred_rel_l1
    return Judged(out, errors, decision.label, launch, own / max(twins, SMALLEST))


def judge_peer(
    peer: Peer, tensors: Tensors, shape: CallShape, exact: Reference
) -> tuple[torch.dtype, Errors]:
    """Dtype and error of a peer's output."""
    full = peer.prepare(*tensors, causal=shape.causal, scale=shape.scale)()
    errors = errors_of(full[:, :, exact.rows].float(), exact.out, exact.mean, full.dtype)
    errors["bad_values"] = float((~torch.isfinite(full)).sum().item())
    return full.dtype, errors


def cell(kernel: str, ours: Judged, peer: Peer, dtype: torch.dtype, theirs: Errors,
         exact: Reference) -> dict[str, Any]:  # fmt: skip
    """One of our kernels against one peer, both in the peer's output dtype."""
    same = errors_of(ours.out.to(dtype).float(), exact.out, exact.mean, dtype)
    name, worst = "centred_rel_l1", "worst_head_centred_rel_l1"
    sound, their_sound = ours.errors["bad_values"] == 0, theirs["bad_values"] == 0
    return {
        "kernel": kernel,
        "peer": peer.name,
        "out_dtype": str(dtype).removeprefix("torch."),
        "ours": same[name],
        "theirs": theirs[name],
        "ratio": same[name] / max(theirs[name], SMALLEST),
        "ours_worst_head": same[worst],
        "theirs_worst_head": theirs[worst],
        "ours_fp32": ours.errors[name],
        "rounding_floor": same["rounding_floor"],
        "ratio_to_emulation": ours.ratio_to_emulation,
        "at_most": sound and (not their_sound or same[name] <= theirs[name]),
        "worst_head_at_most": sound and (not their_sound or same[worst] <= theirs[worst]),
    }


def run_case(
    case: Case, peers: Sequence[Peer], args: argparse.Namespace, notes: Counter[str]
) -> dict[str, Any]:
    """Judge everything on one input; what fails is counted in `notes`, and the others go on."""
    q, k, v = tensors = trimmed(case.load(), args.trim)
    scale = 1.0 / math.sqrt(q.shape[3]) if case.scale is None else case.scale
    shape = shape_of(q, k, v, causal=case.causal, scale=scale, layout="bhsd")
    rows = sample_rows(shape.seq_q, limit=args.rows)
    exact = reference(q, k, v, causal=shape.causal, scale=shape.scale, rows=rows)
    ours: dict[str, Judged] = {}
    theirs: dict[str, tuple[torch.dtype, Errors]] = {}
    for kernel in args.kernels:
        try:
            ours[kernel] = judge_ours(kernel, shape, tensors, exact, args)
        except Exception as error:  # one kernel's failure must not end the table
            notes[f"{kernel}: {peer_kernels.first_line(error)}"] += 1
    for peer in peers:
        try:
            theirs[peer.name] = judge_peer(peer, tensors, shape, exact)
        except Exception as error:
            notes[f"{peer.name}: {peer_kernels.first_line(error)}"] += 1
    cells = [
        cell(kernel, ours[kernel], peer, *theirs[peer.name], exact)
        for kernel in ours
        for peer in peers
        if kernel.partition(":")[0] in peer.against and peer.name in theirs
    ]
    clear()
    return {
        "input": case.name,
        "shape": shape.to_json(),
        "rows": len(rows),
        "ours": {
            kernel: one.errors
            | {"ran": one.label, "launch": one.launch.to_json()}
            | {"ratio_to_emulation": one.ratio_to_emulation}
            for kernel, one in ours.items()
        },
        "peers": {
            name: {"out_dtype": str(dtype).removeprefix("torch."), **errors}
            for name, (dtype, errors) in theirs.items()
        },
        "cells": cells,
    }


# -- report -----------------------------------------------------------------------------------


HEAD = (
    f"{'input':22s} {'B Hq/Hk Sq/Sk D':26s} {'kernel':10s} {'peer':20s} {'out':8s} "
    f"{'ours':>8s} {'theirs':>8s} {'ratio':>7s} {'worst':>8s} {'theirs':>8s} "
    f"{'fp32':>8s} {'floor':>8s} {'sdpa':>8s} {'x emul.':>7s}"
)


def lines_of(row: dict[str, Any]) -> Iterator[str]:
    """The cells of an input as lines of the table; ours alone where there is no peer."""
    shape, peers = row["shape"], row["peers"]
    mask = " causal" if shape["causal"] else ""
    size = (
        f"{shape['batch']} {shape['heads_q']}/{shape['heads_k']} {shape['seq_q']}/{shape['seq_k']} "
        f"{shape['head_dim']}{mask}"
    )
    sdpa = peers.get("sdpa cudnn", peers.get("sdpa flash", {})).get("centred_rel_l1", math.nan)
    start = f"{row['input'][-22:]:22s} {size:26s}"
    for one in row["cells"]:
        mark = "" if one["at_most"] else "  <-- more"
        yield (
            f"{start} {one['kernel']:10s} {one['peer']:20s} {one['out_dtype']:8s} "
            f"{one['ours']:8.5f} {one['theirs']:8.5f} {one['ratio']:7.3f} "
            f"{one['ours_worst_head']:8.5f} {one['theirs_worst_head']:8.5f} "
            f"{one['ours_fp32']:8.5f} {one['rounding_floor']:8.5f} {sdpa:8.5f} "
            f"{one['ratio_to_emulation']:7.4f}{mark}"
        )
    with_peer = {one["kernel"] for one in row["cells"]}
    for kernel, found in row["ours"].items():
        if kernel not in with_peer:
            yield (
                f"{start} {kernel:10s} {'-':20s} {'float32':8s} {found['centred_rel_l1']:8.5f} "
                f"{'':42s} {found['rounding_floor']:8.5f} {sdpa:8.5f} "
                f"{found['ratio_to_emulation']:7.4f}"
            )


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each pair, and a last one over all cells."""
    cells = [one for row in rows for one in row["cells"]]
    if not cells:
        return ["no peer that ours are held to is installed: nothing was compared"]
    pairs = dict.fromkeys((one["kernel"], one["peer"]) for one in cells)
    found = []
    for kernel, peer in pairs:
        own = [one for one in cells if (one["kernel"], one["peer"]) == (kernel, peer)]
        ratios = sorted(one["ratio"] for one in own)
        found.append(
            f"{kernel} / {peer}: {_count(own)}, ratio {ratios[0]:.3f} to {ratios[-1]:.3f}, "
            f"median {ratios[len(ratios) // 2]:.3f}"
        )
    return [*found, f"ours at most theirs in {_count(cells)}"]


def _count(cells: Sequence[dict[str, Any]]) -> str:
    heads = sum(one["worst_head_at_most"] for one in cells)
    return f"{sum(one['at_most'] for one in cells)} of {len(cells)} cells (worst head: {heads})"


def identity(
    device: str, commit: str | None, found: peer_kernels.Found = peer_kernels.NOBODY
) -> dict[str, Any]:
    """What a result has to be read with: device, versions, commit, date, command."""
    return {
        "device": devices.facts(device).to_json(),
        "toolchain": devices.toolchain().to_json(),
        "commit": commit or git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "peers": found.versions,
        "left_out": list(found.left_out),
    }


def write(path: Path, body: dict[str, Any]) -> None:
    """Write JSON, with `null` for numbers that it does not have."""
    path.write_text(json.dumps(finite(body), indent=1, allow_nan=False) + "\n")
    print(f"written to {path}")


# -- command line -----------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """Whole numbers above zero, separated by commas."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needs numbers above zero")
    return found


def kernels(text: str) -> list[str]:
    """Kernels of ours, `kernel` or `kernel:variant`, separated by commas."""
    for part in text.split(","):
        try:
            dispatch.parse_kernel(part)
        except SageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text.split(",")


def distributions(text: str) -> list[str]:
    """Names of `INPUTS`, separated by commas; `none` for none."""
    chosen = [] if text == "none" else text.split(",")
    unknown = [name for name in chosen if name not in INPUTS]
    if unknown:
        allowed = ", ".join(INPUTS)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: allowed are {allowed}, or none alone")
    return chosen


MASKS = {"no": (False,), "yes": (True,), "both": (False, True)}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--kernels", type=kernels, default=list(OURS))
    add("--inputs", type=distributions, default=list(INPUTS), help="drawn inputs, or none")
    add("--lengths", type=numbers, default=[2048, 8192, 32768, 75600])
    add("--head-dims", type=numbers, default=[64, 128])
    add("--heads", type=int, default=4, help=f"of drawn inputs; {LONG_HEADS} over {LONG_SEQ} keys")
    add("--causal", choices=MASKS, default="both")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--captures", type=Path, nargs="+", default=[], help="folders that `sage capture` wrote")
    add("--max-captures", type=int, default=8, help="of each folder, evenly chosen")
    add("--tensors", type=Path, nargs="+", default=[], help="safetensors files with q, k and v")
    add("--rows", type=int, default=128, help="rows judged in every head")
    add("--twin-rows", type=int, default=48, help="rows compared with the emulation")
    add("--trim", type=int, default=1, help="cut lengths to multiples of this")
    add("--device", choices=("cuda", "cpu"), help="cuda where there is one")
    add("--seed", type=int, default=0)
    add("--commit", help="in place of what git says, where the checkout has no history")
    args = parser.parse_args(argv)
    for name in ("heads", "max_captures", "rows", "twin_rows", "trim"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"argument --{flag}: {getattr(args, name)}: needs a number above zero")
    args.causal = MASKS[args.causal]
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no GPU that torch can use")
    if not args.output.parent.is_dir():
        parser.error(f"argument --output: {args.output.parent} is not a folder")
    try:
        args.cases = list(_cases(args))
    except SageError as error:
        parser.error(str(error))
    if not args.cases:
        parser.error("no inputs: give --inputs, --captures or --tensors")
    return args


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for folder in args.captures:
        yield from capture_cases(folder, args.max_captures, args.device)
    for path in args.tensors:
        yield from tensor_cases(path, args.device)
    yield from synthetic_cases(args)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Judge every input, print the table and write one JSON file."""
    args = parsed(argv)
    start = time.perf_counter()
    found = peer_kernels.judged_peers()
    notes: Counter[str] = Counter()
    print(*found.left_out, HEAD, sep="\n", flush=True)
    rows = []
    for case in args.cases:
        try:
            rows.append(run_case(case, found.peers, args, notes))
        except SageError as error:  # a damaged capture must not end the table
            notes[f"{case.name}: {error}"] += 1
            continue
        print(*lines_of(rows[-1]), sep="\n", flush=True)
    elapsed = time.perf_counter() - start
    said = verdict(rows)
    body = identity(args.device, args.commit, found)
    left_out = [f"left out on {n} of {len(args.cases)} inputs: {what}" for what, n in notes.items()]
    body |= {"elapsed_s": elapsed, "verdict": said, "notes": left_out, "rows": rows}
    print(*left_out, f"{len(rows)} inputs in {elapsed:.0f} s", sep="\n")
    write(args.output, body)
    print(*said, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
