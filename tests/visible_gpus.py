"""Workers of the tests over the GPUs of a machine: each has another one first, and sees all."""

from __future__ import annotations

import os
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def rotate() -> None:
    """Let this worker's first GPU be another than its neighbor's; only before torch starts CUDA."""
    here = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    default = ",".join(str(number) for number in range(len(here)))
    given = os.environ.get(VISIBLE, default)
    rotated = rotation(os.environ.get("PYTEST_XDIST_WORKER", ""), given)
    if rotated != given:
        os.environ[VISIBLE] = rotated


def rotation(worker: str, visible: str) -> str:
    """Return the names of GPUs in the order that a worker of xdist sees.

    Args:
        worker: `gw` and a number; anything else leaves the order.
        visible: names of GPUs, separated by commas.
    """
    number, names = worker.removeprefix("gw"), visible.split(",")
    if not number.isdigit():
        return visible
    first = int(number) % len(names)
    return ",".join(names[first:] + names[:first])
