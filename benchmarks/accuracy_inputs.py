"""What `accuracy.py` compares kernels on: drawn tensors, captures, files of tensors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import UsageError
from sage_plugin.measure.inputs import self_attention, synthetic
from sage_plugin.schema import CallShape

INPUTS = ("normal", "biased", "outlier_qk", "outlier_k", "drift")
WIDE_CHANNELS, WIDE_SCALE = 16, 20.0
LONG_SEQ = 40_000
"""Longer inputs get fewer heads and no causal mask."""
LONG_HEADS = 2

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One input.

    Attributes:
        name: distribution, or where the tensors were found.
        causal: bottom-right aligned causal mask.
        scale: factor of the scores; 1/sqrt(D) where `None`.
        load: Q, K and V on the device, indexed bhsd.
    """

    name: str
    causal: bool
    scale: float | None
    load: Callable[[], Tensors]


def drawn(name: str, shape: CallShape, *, device: str, seed: int = 0) -> Tensors:
    """Synthetic Q, K and V of one of `INPUTS`.

    `outlier_qk` multiplies 16 channels of Q and K by 20, `outlier_k` two channels of K by 40; the
    others are those of `measure.inputs`.
    """
    known = {"outlier_k": "outlier", "outlier_qk": "normal"}.get(name, name)
    q, k, v = synthetic(shape, device=device, seed=seed, distribution=known)
    if name == "outlier_qk":
        wide = torch.arange(WIDE_CHANNELS) * max(1, shape.head_dim // WIDE_CHANNELS)
        for tensor in (q, k):
            tensor[..., wide[wide < shape.head_dim].to(tensor.device)] *= WIDE_SCALE
    return q, k, v


def synthetic_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every distribution at every length, head dim and mask that was asked for."""
    for seq in args.lengths:
        for head_dim in args.head_dims:
            for causal in args.causal if seq <= LONG_SEQ else (False,):
                heads = args.heads if seq <= LONG_SEQ else min(LONG_HEADS, args.heads)
                shape = self_attention(1, heads, seq, head_dim, dtype=args.dtype)
                for name in args.inputs:

                    def load(name: str = name, shape: CallShape = shape) -> Tensors:
                        return drawn(name, shape, device=args.device, seed=args.seed)

                    yield Case(name, causal, None, load)


def capture_cases(folder: Path, limit: int, device: str) -> Iterator[Case]:
    """The captures of a folder, evenly chosen; those with a mask are left out."""
    captures = open_captures(folder)
    plain = [r for r in captures.records if r.shape.mask_kind == "none"]
    if len(plain) < len(captures.records):
        print(f"{folder}: {len(captures.records) - len(plain)} captures have a mask: left out")
    step = max(1.0, len(plain) / limit)
    for record in (plain[int(i * step)] for i in range(min(limit, len(plain)))):

        def load(record: Any = record) -> Tensors:  # noqa: ANN401
            call = captures.load(record, device)
            return call.q, call.k, call.v

        name = f"{folder.name}/{record.file.removesuffix('.safetensors')}"
        yield Case(name, record.shape.causal, record.shape.scale, load)


def tensor_cases(path: Path, device: str) -> Iterator[Case]:
    """The calls of a safetensors file: `q`, `k`, `v`, or `NAME.q`, `NAME.k`, `NAME.v` for several.

    The file's metadata may say `causal` (`true`) and `scale`, or `NAME.causal` and `NAME.scale`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            ranks = {key: len(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            notes = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    stems = sorted(key[:-1] for key in ranks if key == "q" or key.endswith(".q"))
    if not stems:
        raise UsageError(f"{path} holds no tensor q or NAME.q: name them q, k and v")
    for stem in stems:
        wrong = [stem + part for part in "qkv" if ranks.get(stem + part) != 4]
        if wrong:
            raise UsageError(f"{path}: {wrong[0]} is missing or not (B, H, S, D)")

        def load(stem: str = stem) -> Tensors:
            with safe_open(path, framework="pt", device=device) as file:
                q, k, v = (file.get_tensor(stem + part) for part in "qkv")
            return q, k, v

        scale = notes.get(f"{stem}scale", notes.get("scale"))
        causal = notes.get(f"{stem}causal", notes.get("causal", "")).lower() in ("true", "1")
        try:
            factor = None if scale is None else float(scale)
        except ValueError:
            raise UsageError(f"{path}: its metadata has scale {scale!r}, no number") from None
        yield Case(f"{path.stem}/{stem}".rstrip("./"), causal, factor, load)


def trimmed(tensors: Tensors, block: int) -> Tensors:
    """Lengths cut to whole blocks; shorter ones stay."""
    q, k, v = (x[:, :, : max(x.shape[2] // block, 1) * block].contiguous() for x in tensors)
    return q, k, v
