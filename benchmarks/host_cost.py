"""What a small call costs the host: torch's SDPA, ours in all, each Triton launch, and the rest.

Microseconds of the calling thread, medians over all calls of all groups; the variants take turns,
and the device is waited for after each group, so that no call waits for a place in its queue.
"outside" is a call of ours less its launches, which hand a build over to the driver
(`launch_graph.relaunch`) or, where a call is not repeated from its launch graph, look for it too
(`launch_graph.launch`), and the zeroing of counters (`launch_graph.memset`); "above SDPA" is what
that exceeds a whole call of SDPA by. A replayed CUDA graph runs nothing of ours, as its `launches`
show.

    python benchmarks/host_cost.py --output host_cost.json [--kernels fav2,...] [--head-dims 64,128]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import identity, kernels, launch_of, numbers, write
from gpu_options import gpu_parser, on_gpu

import sage_plugin
from sage_plugin import device as devices
from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention import dispatch
from sage_plugin.measure.inputs import self_attention, synthetic
from sage_plugin.schema import CallShape

OURS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
SDPA = "sdpa"
WARMUP = 20

Call = Callable[[], object]
Facts = dict[str, Any]


class Launches:
    """The launches of ours while `timed`, in the order of a call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time every launch of this thread's program."""
        stock = launch_graph.launch, launch_graph.relaunch, launch_graph.memset
        launch_graph.launch, launch_graph.relaunch, launch_graph.memset = (
            self._timed(stock[0], lambda kernel: kernel.__name__),
            self._timed(stock[1], lambda one: one.name),
            self._timed(stock[2], lambda size: "memset"),
        )
        try:
            yield
        finally:
            launch_graph.launch, launch_graph.relaunch, launch_graph.memset = stock

    def _timed(
        self, stock: Callable[..., Any], name_of: Callable[[Any], str]
    ) -> Callable[..., Any]:
        def run(what: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
            start = time.perf_counter_ns()
            result = stock(what, *args, **options)
            self.seen.append((name_of(what), (time.perf_counter_ns() - start) / 1e3))
            return result

        return run


def host_us(
    calls: Mapping[str, Call], count: int, groups: int, wait: Callable[[], None]
) -> dict[str, float]:
    """Median microseconds that the host is busy with each call, of `count` in `groups`."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        timed_group(call, WARMUP)
        wait()
    for _ in range(groups):
        for name, call in calls.items():
            samples[name] += timed_group(call, -(-count // groups))
            wait()
    return {name: statistics.median(taken) for name, taken in samples.items()}


def timed_group(call: Call, count: int) -> list[float]:
    """Microseconds of each of some calls, one after the other."""
    stamps = [time.perf_counter_ns()]
    for _ in range(count):
        call()
        stamps.append(time.perf_counter_ns())
    return [(end - start) / 1e3 for start, end in itertools.pairwise(stamps)]


def launches_us(call: Call, count: int, groups: int, wait: Callable[[], None]) -> list[Facts]:
    """Each launch of a call with its median, in the order in which the call makes them."""
    launches = Launches()
    with launches.timed():
        call()
        names = [name for name, _ in launches.seen]
        launches.seen.clear()
        for _ in range(groups):
            for _ in range(-(-count // groups)):
                call()
            wait()
    taken = [us for _, us in launches.seen]
    return [
        {"kernel": name, "us": statistics.median(taken[place :: len(names)])}
        for place, name in enumerate(names)
    ]


def replayed(call: Call, count: int, groups: int) -> Facts:
    """A call as a CUDA graph: time of the device and of the host a replay, and what it launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    wait, launches = torch.cuda.synchronize, Launches()
    host = host_us({"graph": graph.replay}, count, groups, wait)["graph"]
    device: list[float] = []
    with launches.timed():
        for _ in range(groups):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(-(-count // groups)):
                graph.replay()
            end.record()
            wait()
            device.append(1e3 * begin.elapsed_time(end) / -(-count // groups))
    return {
        "host_us": host, "device_us": statistics.median(device), "launches": len(launches.seen),
    }  # fmt: skip


def calls_of(shape: CallShape, args: argparse.Namespace) -> dict[str, Call]:
    """SDPA and our kernels on the same tensors, as users call them."""
    q, k, v = synthetic(shape, device=args.device, distribution="biased")
    calls: dict[str, Call] = {SDPA: lambda: F.scaled_dot_product_attention(q, k, v)}
    for label in args.kernels:
        kernel, variant = dispatch.parse_kernel(label)
        calls[label] = functools.partial(
            sage_plugin.attention, q, k, v, kernel=kernel, variant=variant
        )
    return calls


def rows_of(shape: CallShape, args: argparse.Namespace) -> list[Facts]:
    """All variants on one shape."""
    on_gpu = args.device == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    calls, facts = calls_of(shape, args), devices.facts(args.device)
    totals = host_us(calls, args.calls, args.groups, wait)
    rows = []
    for name, call in calls.items():
        row: Facts = {"variant": name, "shape": shape.to_json(), "total_us": totals[name]}
        if name != SDPA:
            decision, config = launch_of(name, shape, facts)
            row |= {"ran": decision.label, "launch": config.to_json()}
            row |= split(totals[name], launches_us(call, args.calls, args.groups, wait), totals)
        if on_gpu:
            row["graph"] = replayed(call, args.calls, args.groups)
        print(line_of(row), flush=True)
        rows.append(row)
    return rows


def split(total_us: float, launches: list[Facts], totals: Mapping[str, float]) -> Facts:
    """A call of ours in parts."""
    outside = total_us - sum(one["us"] for one in launches)
    return {
        "launches": launches,
        "launches_us": total_us - outside,
        "outside_us": outside,
        "above_sdpa_us": outside - totals[SDPA],
    }


def line_of(row: Facts) -> str:
    """One row as a line of the table."""
    text = f"{row['variant']:10s} D{row['shape']['head_dim']:<4d} {row['total_us']:7.1f} us"
    if "launches" in row:
        parts = " + ".join(f"{one['kernel']} {one['us']:.1f}" for one in row["launches"])
        text += (
            f" = {row['outside_us']:.1f} outside ({row['above_sdpa_us']:+.1f} above SDPA)"
            f" + {parts or 'no launch'}"
        )
    if "graph" in row:
        graph = row["graph"]
        text += f"; replay {graph['host_us']:.1f} us host, {graph['device_us']:.1f} us device"
    return text


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--kernels", type=kernels, default=list(OURS))
    add("--head-dims", type=numbers, default=[64, 128])
    add("--heads", type=int, default=8)
    add("--length", type=int, default=1024)
    add("--calls", type=int, default=2000, help="timed calls of each variant")
    add("--groups", type=int, default=20, help="the device is waited for after each")
    args = parser.parse_args(argv)
    if min(args.heads, args.length, args.calls, args.groups) < 1:
        parser.error("arguments --heads, --length, --calls, --groups: need numbers above zero")
    return on_gpu(parser, args, "without one nothing is launched")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure all head dims and write one JSON file."""
    args = parsed(argv)
    rows: list[Facts] = []
    for dim in args.head_dims:
        rows += rows_of(self_attention(1, args.heads, args.length, dim), args)
    how = {"calls": args.calls, "groups": args.groups}
    write(args.output, identity(args.device, args.commit) | how | {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
