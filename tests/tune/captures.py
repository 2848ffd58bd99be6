"""Tiny capture folders of several calls, written without a model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sage_plugin.capture.store.manifest import CallCounts, ShapeCount
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.schema import CallShape
from tests.bench.folders import record_of, tensors_of

CALLS = 10
"""Calls that the recording saw for each saved one."""

SELF = CallShape(1, 4, 4, 96, 96, 32, 32, "bfloat16", False, "none", "bshd", 32**-0.5)
GROUPED = CallShape(1, 4, 2, 64, 64, 32, 32, "float16", True, "none", "bhsd", 32**-0.5)
MASKED = dataclasses.replace(SELF, mask_kind="key_bias")
DENSE = dataclasses.replace(GROUPED, mask_kind="dense")
WIDE = dataclasses.replace(SELF, head_dim=264, dv=264)
"""No kernel takes it."""


def write(folder: Path, saved: Sequence[tuple[CallShape, tuple[int, ...]]]) -> Path:
    """Write one capture per pair of a full shape and its saved key heads."""
    writer = CaptureWriter(folder)
    writer.open()
    calls: Counter[CallShape] = Counter()
    for number, (shape, heads) in enumerate(saved):
        batches = tuple(range(shape.batch))
        tensors = tensors_of(shape, heads, batches, seed=number, distribution="normal")
        record = record_of(shape, heads=heads, batches=batches, step=number)
        writer.save(
            tensors, dataclasses.replace(record, layer=f"transformer.blocks.{number}.attn1")
        )
        calls[shape] += CALLS
    shapes = tuple(ShapeCount(shape, count) for shape, count in calls.items())
    writer.close(CallCounts(complete=True, layers={"a": calls.total()}, shapes=shapes))
    return folder


def damage(folder: Path, number: int) -> None:
    """Change one value of a capture, as a bad disk does."""
    path = folder / f"{number:06d}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
