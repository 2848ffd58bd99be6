"""The four ways to time one round of calls: `events`, `graph`, `profiler` and `wall`.

A cold-L2 flush stands between the calls and never inside a timed interval.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from sage_plugin.errors import UsageError

METHODS = ("events", "graph", "profiler", "wall")
MIN_FLUSH_BYTES = 256 * 2**20
"""More than twice the largest L2 in use."""

MAX_FLUSHES = 64
"""Bounds the wait for a call that blocks the host."""

GRAPH_MS = 1.0
"""A graph timed with a warm L2 repeats its call until it lasts this long."""

Functions = Mapping[str, Callable[[], object]]
Round = Callable[[Sequence[str]], Sequence[float]]
"""Times the named functions once each, in that order; milliseconds."""


@contextlib.contextmanager
def timer(
    functions: Functions, device: torch.device, method: str, *, cold_l2: bool = True
) -> Iterator[Round]:
    """Yield a function that times named calls, one after the other, in milliseconds.

    Args:
        functions: name to call.
        device: where the calls run.
        method: one of `METHODS`.
        cold_l2: flush L2 before each call.

    Raises:
        UsageError: the method is unknown, or the device has not got it.
    """
    check_method(method, device)
    if device.type == "cpu":
        yield lambda names: [_wall_ms(functions[name]) for name in names]
        return
    with torch.cuda.device(device):
        flush = _flush(device) if cold_l2 else _nothing
        if method == "events":
            yield _events(functions, flush)
        elif method == "graph":
            yield _graphs(functions, flush, repeat=not cold_l2)
        elif method == "profiler":
            yield lambda names: [_profiled_ms(functions[name], flush) for name in names]
        else:
            yield lambda names: [_synchronized_ms(functions[name], flush) for name in names]
        torch.cuda.synchronize()


def check_method(method: str, device: torch.device) -> None:
    """Refuse a method that the device has not got."""
    allowed = ("wall",) if device.type == "cpu" else METHODS
    if method not in allowed:
        raise UsageError(
            f"timing method {method!r} on {device.type}: allowed are {', '.join(allowed)}"
        )


def _nothing() -> None:
    """The flush where L2 stays warm."""


def _flush(device: torch.device) -> Callable[[], object]:
    """A call that replaces everything in L2."""
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    size = max(MIN_FLUSH_BYTES, 2 * l2_bytes + 1)
    return torch.zeros(size // 4 + 1, dtype=torch.int32, device=device).zero_


def _wall_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


def _synchronized_ms(call: Callable[[], object], flush: Callable[[], object]) -> float:
    flush()
    torch.cuda.synchronize()

    def finished() -> None:
        call()
        torch.cuda.synchronize()

    return _wall_ms(finished)


def _events(functions: Functions, flush: Callable[[], object]) -> Round:
    """Events around each call alone; the host waits once a round, so that it queues ahead.

    A call of several launches takes the host longer to queue than one flush lasts, and the device
    would wait inside the timed interval. So the flush is repeated for as long as the host needed
    to queue this call in the round before.
    """
    flush_ms = _one_flush_ms(flush)
    flushes = dict.fromkeys(functions, 1)

    def run_round(names: Sequence[str]) -> list[float]:
        pairs = []
        for name in names:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            for _ in range(flushes[name]):
                flush()
            begin.record()
            queued_ms = _wall_ms(functions[name])
            end.record()
            flushes[name] = min(MAX_FLUSHES, 2 + int(queued_ms / flush_ms))
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]

    return run_round


def _one_flush_ms(flush: Callable[[], object]) -> float:
    """How long one flush keeps the device busy; infinite where there is none."""
    if flush is _nothing:
        return float("inf")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush()
    begin.record()
    flush()
    end.record()
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end), 1e-3)


def _graphs(functions: Functions, flush: Callable[[], object], *, repeat: bool) -> Round:
    """One captured graph a function; repeated calls inside it would find L2 warm."""
    counts, replays = {}, {}
    for name, call in functions.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles and fills caches outside the capture
            call()
        torch.cuda.current_stream().wait_stream(side)
        once = _events({name: call}, _nothing)([name])[0]
        counts[name] = max(1, int(GRAPH_MS / max(once, 1e-3))) if repeat else 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(counts[name]):
                call()
        replays[name] = graph.replay
    timed = _events(replays, flush)

    def run_round(names: Sequence[str]) -> list[float]:
        return [ms / counts[name] for name, ms in zip(names, timed(names), strict=True)]

    return run_round


def _profiled_ms(call: Callable[[], object], flush: Callable[[], object]) -> float:
    """Sum of the kernels' own times; gaps between them do not count."""
    flush()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return (
        sum(
            event.time_range.elapsed_us()
            for event in profile.events() or ()
            if event.device_type == torch._C._autograd.DeviceType.CUDA
        )
        / 1000
    )
