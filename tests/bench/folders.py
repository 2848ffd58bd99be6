"""Capture folders written with the real writer, tiny enough for a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sage_plugin.capture.record import AttentionCapture
from sage_plugin.capture.store.manifest import CallCounts
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.kernels.call_words import describe
from sage_plugin.measure.inputs import self_attention, synthetic
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import SCHEMA_VERSION, CallShape

SHAPE = self_attention(1, 2, 48, 32)


def record_of(
    shape: CallShape, *, heads: tuple[int, ...], batches: tuple[int, ...], step: int = 0
) -> AttentionCapture:
    """A manifest line but for file and checksum."""
    strides = (1, 1, 1, 1)
    return AttentionCapture(
        schema_version=SCHEMA_VERSION, family="attention", file="",
        layer="transformer.blocks.0.attn", step=step, timestep=None, call_index=0, shape=shape,
        batch_indices=batches, head_indices=heads, strides_q=strides, strides_k=strides,
        strides_v=strides, text_length=None, model_class="Toy", config_hash="", versions={},
        sha256="",
    )  # fmt: skip


def tensors_of(
    shape: CallShape, heads: Sequence[int], batches: Sequence[int], *, seed: int, distribution: str
) -> dict[str, torch.Tensor]:
    """What is saved of some heads and batch items of a call."""
    heads_q = len(heads) * shape.heads_q // shape.heads_k
    saved = dataclasses.replace(
        shape, batch=len(batches), heads_q=heads_q, heads_k=len(heads), layout="bhsd"
    )
    drawn = synthetic(saved, device="cpu", seed=seed, distribution=distribution)
    tensors = dict(zip("qkv", drawn, strict=True))
    if shape.mask_kind == "key_bias":
        tensors["key_bias"] = torch.zeros(len(batches), 1, shape.seq_k)
        for item, bias in enumerate(tensors["key_bias"]):
            bias[:, shape.seq_k // 2 + item :] = -torch.inf
    if shape.mask_kind == "dense":
        size = (len(batches), heads_q, shape.seq_q, shape.seq_k)
        tensors["attn_mask"] = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5
    return tensors


def write(
    folder: Path,
    shape: CallShape = SHAPE,
    *,
    count: int = 1,
    heads: tuple[int, ...] | None = None,
    batches: tuple[int, ...] | None = None,
) -> Path:
    """Write `count` captures, of some heads where they are named."""
    heads = tuple(range(shape.heads_k)) if heads is None else heads
    batches = tuple(range(shape.batch)) if batches is None else batches
    writer = CaptureWriter(folder)
    writer.open()
    for step in range(count):
        tensors = tensors_of(shape, heads, batches, seed=step, distribution="biased")
        writer.save(tensors, record_of(shape, heads=heads, batches=batches, step=step))
    writer.close(CallCounts())
    return folder


def drawn(shape: CallShape, **options: Any) -> ReplayInputs:
    """Inputs to be drawn, named by their shape."""
    return ReplayInputs(shape, describe(shape), **options)
