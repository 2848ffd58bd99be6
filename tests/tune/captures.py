"""Tiny capture folders, written without a model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from sage_plugin.capture.record import AttentionCapture
from sage_plugin.capture.store.manifest import CallCounts, ShapeCount, append_record, write_counts
from sage_plugin.schema import CallShape
from tests.tune import scripted

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
    folder.mkdir(parents=True, exist_ok=True)
    calls: Counter[CallShape] = Counter()
    for number, (shape, heads) in enumerate(saved):
        append_record(folder, _record(folder, number, shape, heads))
        calls[shape] += CALLS
    shapes = tuple(ShapeCount(shape, count) for shape, count in calls.items())
    write_counts(folder, CallCounts(complete=True, layers={"a": calls.total()}, shapes=shapes))
    return folder


def damage(folder: Path, number: int) -> None:
    """Change one value of a capture, as a bad disk does."""
    path = folder / f"{number:06d}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


def _record(
    folder: Path, number: int, shape: CallShape, heads: tuple[int, ...]
) -> AttentionCapture:
    generator = torch.Generator().manual_seed(number)
    dtype = getattr(torch, shape.dtype)

    def draw(head_count: int, seq: int, width: int) -> torch.Tensor:
        return torch.randn(shape.batch, head_count, seq, width, generator=generator).to(dtype)

    group = shape.heads_q // shape.heads_k
    tensors = {
        "q": draw(len(heads) * group, shape.seq_q, shape.head_dim),
        "k": draw(len(heads), shape.seq_k, shape.head_dim),
        "v": draw(len(heads), shape.seq_k, shape.dv),
    }
    if shape.mask_kind == "key_bias":
        tensors["key_bias"] = torch.zeros(1, 1, shape.seq_k)
        tensors["key_bias"][..., shape.seq_k // 2 :] = -torch.inf
    if shape.mask_kind == "dense":
        heads_q, size = len(heads) * group, (shape.seq_q, shape.seq_k)
        tensors["attn_mask"] = torch.rand(1, heads_q, *size, generator=generator) < 0.5
    name = f"{number:06d}.safetensors"
    save_file(tensors, folder / name)
    return dataclasses.replace(
        scripted.CAPTURED,
        file=name,
        layer=f"transformer.blocks.{number}.attn1",
        step=number,
        shape=shape,
        batch_indices=tuple(range(shape.batch)),
        head_indices=heads,
        sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
    )
