"""Processes that compile candidates without a GPU, ahead of the lanes that time them.

What they build stays in Triton's cache on disk, where the process with the GPU finds it. A GPU that
waits for a compiler is idle, and a compiler takes most of a trial's time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sage_plugin.kernels import absent_device
from sage_plugin.kernels.contract import Decision
from sage_plugin.schema import AnyLaunch, DeviceFacts
from sage_plugin.tune.run.runner import Resources
from sage_plugin.tune.run.study import Problem
from sage_plugin.tune.run.worker import Reply, WorkerProcess

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
MOST_WORKERS = 16
"""By default; each process takes 0.8 GB."""

_stands_for: DeviceFacts | None = None


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Compile what one config launches for the inputs of a study."""

    problem: Problem
    config: AnyLaunch

    def __call__(self) -> Resources:
        """Run in a child without a GPU; what the kernel with the most shared memory takes."""
        global _stands_for
        problem = self.problem
        if _stands_for != problem.facts:
            absent_device.become(problem.facts)
            _stands_for = problem.facts
        family, key = problem.timed.family, problem.key
        decision = Decision(key.kernel, key.variant)
        shapes = dict.fromkeys([problem.timed.shape, *(s.saved_shape for s in problem.sources)])
        every = [
            built
            for shape in shapes
            for built in family.compile_call(shape, decision, self.config, problem.facts)
        ]
        largest = max(every, key=lambda built: built.smem_bytes)
        return Resources(largest.registers, largest.spill_bytes, largest.smem_bytes)


def default_workers() -> int:
    """How many compile processes a machine can do with, beside its lanes."""
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 2) - 2))


class CompilePool:
    """Compile processes, shared by all lanes of a session; each of them may close it.

    Args:
        num_workers: processes.
        timeout_s: longest that one config may take.
        log: where their output goes.
    """

    def __init__(self, num_workers: int, *, timeout_s: float, log: Path | None = None) -> None:
        self._workers: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._every = [
            WorkerProcess(timeout_s=timeout_s, log=log, environment=NO_GPU)
            for _ in range(num_workers)
        ]
        for worker in self._every:
            self._workers.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="compile")
        self._replies: dict[tuple[str, AnyLaunch], Future[Reply]] = {}
        self._lock = threading.Lock()
        self._cancelled = False

    def submit(self, problem: Problem, configs: Iterable[AnyLaunch]) -> None:
        """Queue configs that are not compiled or queued yet."""
        with self._lock:
            if self._cancelled:
                raise KeyboardInterrupt
            for config in configs:
                if (problem.id, config) not in self._replies:
                    job = CompileJob(problem, config)
                    self._replies[problem.id, config] = self._threads.submit(self._compiled, job)

    def reply(self, problem: Problem, config: AnyLaunch) -> Reply:
        """Wait until a config is compiled."""
        self.submit(problem, [config])
        try:
            return self._replies[problem.id, config].result()
        except CancelledError:
            raise KeyboardInterrupt from None

    def known(self, problem: Problem) -> Mapping[AnyLaunch, Resources]:
        """What is compiled of a study so far."""
        with self._lock:
            done = [(k, f) for k, f in self._replies.items() if f.done() and not f.cancelled()]
        ready = [(key, future) for key, future in done if future.exception() is None]
        replies = {config: f.result() for (study, config), f in ready if study == problem.id}
        return {c: reply.value for c, reply in replies.items() if reply.status == "done"}

    def cancel(self) -> None:
        """End what runs, from any thread; who waits or asks on gets `KeyboardInterrupt`."""
        with self._lock:
            self._cancelled = True
        for worker in self._every:
            worker.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End all processes; what is queued is dropped."""
        self.cancel()
        self._threads.shutdown(wait=True)
        for worker in self._every:
            worker.close()

    def _compiled(self, job: CompileJob) -> Reply:
        worker = self._workers.get()
        try:
            return worker.run(job)
        finally:
            self._workers.put(worker)
