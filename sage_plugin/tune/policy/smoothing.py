"""Smoothing factors of recorded linears: what their inputs' channels are divided by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from sage_plugin import files
from sage_plugin.capture.record import LinearCapture
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.errors import CaptureError
from sage_plugin.kernels.linear.weight import smoothing
from sage_plugin.plugin.linears.smoothing import HEADER
from sage_plugin.schema import LINEAR

STRENGTH = 0.5


@dataclass(frozen=True, slots=True)
class FoundSmoothing:
    """Factors of the linears of a capture folder.

    Attributes:
        factors: `(K,)` fp32 by layer.
        inputs: how many different inputs they are of.
        notes: a sentence for each capture that was left out.
    """

    factors: dict[str, torch.Tensor]
    inputs: int
    notes: tuple[str, ...]


def smoothing_of(captures: CaptureFolder, strength: float = STRENGTH) -> FoundSmoothing:
    """Find the factors of every linear that was recorded.

    Linears whose inputs have the same largest magnitudes read one tensor: they get the factors of
    all of their weights together.

    Args:
        captures: the folder.
        strength: how much of the outliers moves into the weights, from 0 to 1.

    Raises:
        CaptureError: no linear was recorded, or none with its weight.
    """
    peaks: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    notes = list(captures.problems)
    for record in _linears(captures):
        try:
            found = captures.tensors(record)["x"].float().abs().amax(0)
            if record.layer not in weights:
                weights[record.layer] = captures.weight(record).float().abs().amax(0)
        except CaptureError as error:
            notes.append(f"left out: {error}")
            continue
        if not found.isfinite().all():
            notes.append(f"left out: {record.file} has inputs that are not finite")
            continue
        before = peaks.get(record.layer)
        peaks[record.layer] = found if before is None else torch.maximum(before, found)
    if not peaks:
        raise CaptureError(
            f"{captures.path} has no captures of linears with their weights: record with "
            "`sage capture --op linear`"
        )
    readers: dict[bytes, list[str]] = {}
    for layer, one in peaks.items():
        readers.setdefault(one.numpy().tobytes(), []).append(layer)
    factors: dict[str, torch.Tensor] = {}
    for layers in readers.values():
        largest = torch.stack([weights[layer] for layer in layers]).amax(0)
        shared = smoothing(peaks[layers[0]], largest[None], strength=strength)
        factors |= dict.fromkeys(layers, shared)
    return FoundSmoothing(factors, len(readers), tuple(notes))


def write(path: Path, factors: Mapping[str, torch.Tensor]) -> None:
    """Write factors to a file that `patch` reads, whole or not at all.

    Args:
        path: the file.
        factors: `(K,)` by path of the linear with the component in front.

    Raises:
        OutputError: it cannot be written.
    """
    tensors = {name: one.float().cpu().clone() for name, one in factors.items()}
    files.write_atomically(path, save(tensors, metadata=HEADER))


def _linears(captures: CaptureFolder) -> Iterable[LinearCapture]:
    for record in captures.records:
        if isinstance(record, LinearCapture) and record.family == LINEAR:
            yield record
