"""What a call loses by the config that was tuned at another length.

For each kind of call: some configs are timed at some lengths; the winner of each length is priced
at all others; each length is left out once and served by what a registry of the others finds; and
the fewest winners are named that stay within a limit at every length.

    python benchmarks/region_regret.py --output regret.json [--budget 170] [--configs 6]
    python benchmarks/region_regret.py --output regret.json --ledgers tuning_runs/*

The second form times nothing: it takes the trials of tuning runs, a study a length.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peer_kernels
from accuracy import identity, write
from gpu_options import gpu_parser, on_gpu

from sage_plugin import device as devices
from sage_plugin.families import ATTENTION
from sage_plugin.kernels.attention.launch_space import candidates
from sage_plugin.kernels.contract import Decision
from sage_plugin.measure.timing import measure
from sage_plugin.registry import distance, load, lookup
from sage_plugin.registry.merge import merge
from sage_plugin.registry.regions import LIMIT, fewest, prices, regret, winners
from sage_plugin.schema import (
    CallKey,
    CallShape,
    DeviceFacts,
    EntryEvidence,
    ErrorMetrics,
    LaunchConfig,
    RegistryEntry,
    Timing,
)
from sage_plugin.tune.held.prices import of_runs

Times = Mapping[int, Mapping[LaunchConfig, float]]
"""Milliseconds by length and config."""
ROUNDS = 15
BUILD_SHARE = 0.6
"""Part of the budget that building may take."""
SIGNATURES = {
    # batch, query heads, key heads, channels, causal, lengths
    "video, 64 channels": (2, 30, 30, 64, False, (4096, 8192, 17_776, 32_768)),
    "video, 128 channels": (1, 24, 24, 128, False, (4096, 8192, 16_384, 32_768, 65_536)),
    "language, 128 channels": (1, 32, 8, 128, True, (8192, 16_384, 32_768, 65_536)),
}
NO_ERROR = ErrorMetrics(0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0)


def left_out(
    times: Times, keys: Mapping[int, CallKey], facts: DeviceFacts
) -> dict[int, dict[str, Any]]:
    """Serve each length by a registry of the other lengths' winners: from where, with what loss."""
    best = winners(times)
    found = {}
    for seq in sorted(times):
        others = [entry(keys[at], best[at], times[at][best[at]]) for at in best if at != seq]
        match = served(keys[seq], others, facts)
        found[seq] = {
            "from": None if match is None else match.entry.key.seq_q,
            "rule": None if match is None else match.nearness.name.lower(),
            "regret": None if match is None else regret(times, seq, match.entry.config),
        }
    return found


def served(
    key: CallKey, entries: Sequence[RegistryEntry], facts: DeviceFacts
) -> lookup.Match | None:
    """What a registry of these entries finds for a call, as the runtime looks it up."""
    with tempfile.TemporaryDirectory() as folder:
        path = load.file_path(folder, facts.slug)
        merge(path, entries, family="attention", facts=facts, toolchain=devices.toolchain())
        matches = lookup.matches_in(load.read(path), key, path, "here") if entries else []
    return matches[0] if matches else None


def entry(key: CallKey, config: LaunchConfig, ms: float) -> RegistryEntry:
    """An entry that stands for a winner."""
    timing = Timing(ms, ms, ms, ROUNDS, "events")
    evidence = EntryEvidence(
        time=timing, baseline_time=timing, baseline="", gain_low=1.0, errors=NO_ERROR,
        synthetic=True, inputs=("regret",), run="regret", toolchain=devices.toolchain(), date="",
    )  # fmt: skip
    return RegistryEntry(key, (key.seq_q, key.seq_q), (key.seq_k, key.seq_k), config, evidence)


def table(
    name: str, times: Times, keys: Mapping[int, CallKey], facts: DeviceFacts
) -> dict[str, Any]:
    """All figures of one kind of call, as JSON."""
    first, without = next(iter(keys.values())), left_out(times, keys, facts)
    worst = [row["regret"] for row in without.values()]
    known = [value for value in worst if value is not None]
    return {
        "call": name,
        "kernel": f"{first.kernel}:{first.variant}",
        "ms": {
            f"{seq}": [[c.to_json(), ms] for c, ms in row.items()] for seq, row in times.items()
        },
        "winners": {f"{seq}": config.to_json() for seq, config in winners(times).items()},
        "prices": _named(prices(times)),
        "left_out": _named(without),
        "worst_regret": max(known, default=None),
        "unserved": worst.count(None),
        "fewest": _fewest(times),
    }


def _fewest(times: Times) -> dict[str, list[int]]:
    """The fewest lengths whose winners keep all within the limit, and what each serves."""
    found = fewest({(seq,): row for seq, row in times.items()})
    return {f"{seq}": [*span] for (seq,), (span,) in found.items()}


def _named(rows: Mapping[int, Mapping[Any, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{at}": {f"{name}": value for name, value in row.items()} for at, row in rows.items()}


def shown(row: Mapping[str, Any]) -> str:
    """One kind of call as a table: winners down, lengths across, percent lost."""
    lengths = list(row["prices"])
    lines = [f"{row['call']}, {row['kernel']}: percent lost, winner of a length at all lengths"]
    lines.append("  ".join(f"{seq:>8}" for seq in ("winner", *lengths)))
    for at in lengths:
        cells = (row["prices"][at][seq] for seq in lengths)
        shown_cells = ("-" if cell is None else f"{100 * cell:.2f}" for cell in cells)
        lines.append("  ".join(f"{cell:>8}" for cell in (at, *shown_cells)))
    cells = (row["left_out"][seq]["regret"] for seq in lengths)
    shown_cells = ("-" if cell is None else f"{100 * cell:.2f}" for cell in cells)
    lines.append("  ".join(f"{cell:>8}" for cell in ("left out", *shown_cells)))
    kept = ", ".join(f"{at} for {low} to {high}" for at, (low, high) in row["fewest"].items())
    return "\n".join([*lines, f"fewest entries within {100 * LIMIT:g} %: {kept}"])


# -- from tuning runs --------------------------------------------------------------------------


def of_ledgers(runs: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """A table for each kind of call of which runs of one card have several lengths."""
    facts, found = of_runs(runs)
    groups: defaultdict[tuple[object, ...], dict[int, CallKey]] = defaultdict(dict)
    for key in found:
        groups[*distance.alike(key), key.batch_heads][key.seq_q] = key
    for keys in groups.values():
        if len(keys) > 1:
            first = next(iter(keys.values()))
            name = f"{facts.slug}, {first.head_dim} channels{', causal' if first.causal else ''}"
            yield table(name, {seq: found[key] for seq, key in keys.items()}, keys, facts)


# -- on a GPU ----------------------------------------------------------------------------------


def shapes_of(signature: Sequence[Any]) -> list[CallShape]:
    """The calls of one kind."""
    batch, heads_q, heads_k, dim, causal, lengths = signature
    return [
        CallShape(
            batch, heads_q, heads_k, seq, seq, dim, dim, "bfloat16", causal, "none", "bhsd",
            dim**-0.5,
        )
        for seq in lengths
    ]  # fmt: skip


def pool(key: CallKey, facts: DeviceFacts, count: int) -> list[LaunchConfig]:
    """The default, and configs from all over the space of a call."""
    default, *others = candidates(key, facts)
    count = min(count - 1, len(others))
    return [default, *(others[(2 * i + 1) * len(others) // (2 * count)] for i in range(count))]


def decided(shape: CallShape, facts: DeviceFacts, args: argparse.Namespace) -> Decision:
    """The kernel that was asked for, and its variant for this call."""
    kernel, variant = ATTENTION.parse_kernel(args.kernel)
    return ATTENTION.decide(shape, facts, kernel=kernel, variant=variant)


def timed(
    name: str, facts: DeviceFacts, args: argparse.Namespace, deadline: float
) -> dict[str, Any] | None:
    """Time the pool at every length that there is time for; `None` for fewer than two."""
    times: dict[int, dict[LaunchConfig, float]] = {}
    keys: dict[int, CallKey] = {}
    for shape in shapes_of(SIGNATURES[name]):
        if time.monotonic() > deadline:
            break
        decision = decided(shape, facts, args)
        key = ATTENTION.call_key(shape, decision)
        call = ATTENTION.drawn(shape, args.device, 0, "biased")
        configs = pool(key, facts, args.configs)
        calls = {f"{i}": call.whole(decision, config) for i, config in enumerate(configs)}
        samples = measure(
            calls, device=args.device, warmup=1, min_samples=ROUNDS, max_samples=ROUNDS,
            budget_s=max(1.0, min(10.0, deadline - time.monotonic())),
        )  # fmt: skip
        keys[shape.seq_q] = key
        times[shape.seq_q] = {
            config: samples[f"{i}"].timing().median_ms for i, config in enumerate(configs)
        }
    return table(name, times, keys, facts) if len(times) > 1 else None


def warm(facts: DeviceFacts, args: argparse.Namespace) -> None:
    """Build every config in processes of their own, which leave their builds on the disk."""
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--output", str(args.output), "--kernel", args.kernel,
             "--configs", f"{args.configs}", "--build", name, f"{number}"],
        )
        for name in SIGNATURES
        for number in range(args.configs)
    ]  # fmt: skip
    until = time.monotonic() + BUILD_SHARE * args.budget
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()  # what it did not build is built when it is timed


def build(facts: DeviceFacts, args: argparse.Namespace) -> None:
    """Run one config of a pool once, at the shortest length."""
    name, number = args.build[0], int(args.build[1])
    shape = shapes_of(SIGNATURES[name])[0]
    decision = decided(shape, facts, args)
    configs = pool(ATTENTION.call_key(shape, decision), facts, args.configs)
    if number < len(configs):
        ATTENTION.drawn(shape, args.device, 0, "biased").whole(decision, configs[number])()


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--ledgers", type=Path, nargs="+", help="folders of tuning runs, in place of a GPU")
    add("--kernel", default="fav3_sage", help="kernel, or kernel:variant")
    add("--configs", type=int, default=6, help="configs that are timed for each kind of call")
    add("--budget", type=float, default=170.0, help="seconds for all of it")
    add("--build", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.device = "cpu"
    return args if args.ledgers else on_gpu(parser, args, "its times are what this is about")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, show and write, kind by kind."""
    args = parsed(argv)
    deadline = time.monotonic() + args.budget
    facts = devices.facts(args.device)
    if args.build:
        build(facts, args)
        return 0
    rows: list[dict[str, Any]] = []
    body = identity(args.device, peer_kernels.Found((), {}, ()), args.commit)
    if not args.ledgers:
        warm(facts, args)
    found = (
        of_ledgers(args.ledgers)
        if args.ledgers
        else (timed(name, facts, args, deadline) for name in SIGNATURES)
    )
    for row in filter(None, found):
        rows.append(row)
        print(shown(row), flush=True)
        write(args.output, body | {"limit": LIMIT, "rows": rows})
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
