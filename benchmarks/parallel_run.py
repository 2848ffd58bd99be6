"""What the programs share that torchrun starts once a GPU; no program."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from sage_plugin.measure.timing import Samples, measure
from sage_plugin.schema import Timing

WARMUP = 2


@dataclass(frozen=True, slots=True)
class Place:
    """One of the processes.

    Attributes:
        rank: its number, from 0.
        world: how many there are.
        device: where it computes.
    """

    rank: int
    world: int
    device: torch.device


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """This process among those of torchrun: on a GPU of its own, over NCCL; on CPUs over gloo.

    Raises:
        SystemExit: torchrun did not start it.
    """
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun --nproc-per-node 2")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    torch.distributed.init_process_group("nccl" if gpus else "gloo")
    try:
        yield Place(rank, world, device)
    finally:
        torch.distributed.destroy_process_group()


def timed(steps: Mapping[str, Callable[[], object]], at: Place, rounds: int) -> dict[str, Timing]:
    """Times of steps that all processes take together, the slowest process of each round.

    Args:
        steps: the same in each process, in the same order.
        at: this process.
        rounds: how often each is timed; every process has to take as many.
    """
    torch.distributed.barrier()
    mine = measure(
        steps, device=at.device, warmup=WARMUP, warmup_s=0.0, min_samples=rounds,
        max_samples=rounds, budget_s=math.inf, precision=0.0,
    )  # fmt: skip
    every: list[dict[str, Samples]] = [{} for _ in range(at.world)]
    torch.distributed.all_gather_object(every, mine)
    return {
        name: Samples(
            name, tuple(map(max, *(one[name].ms for one in every), [0.0] * rounds)), samples.method
        ).timing()
        for name, samples in mine.items()
    }


def relative_l1(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative L1 distance of two outputs in any process."""
    distance = (out.float() - exact.float()).abs().mean() / exact.float().abs().mean()
    torch.distributed.all_reduce(distance, torch.distributed.ReduceOp.MAX)
    return float(distance)
