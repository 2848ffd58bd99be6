"""Fewer captures that still stand for all: spread over shapes, layers and steps."""

from __future__ import annotations

from collections.abc import Sequence

from sage_plugin.capture.record import CaptureRecord
from sage_plugin.errors import UsageError

_OTHER_SHAPE = 2.0
"""Distance of two captures that differ in shape: more than layers and steps can make up."""


def pick(records: Sequence[CaptureRecord], n: int) -> tuple[CaptureRecord, ...]:
    """Choose `n` captures, each as far from those already chosen as can be.

    Every shape is taken before one is taken twice, and then distant layers and steps.

    Args:
        records: the captures to choose from.
        n: how many; all come back where there are no more.

    Returns:
        The chosen ones in their given order.

    Raises:
        UsageError: `n` is less than 1.

    Example:
        >>> pick((), 3)
        ()
    """
    if n < 1:
        raise UsageError(f"number of captures: got {n}, expected at least 1")
    if n >= len(records):
        return tuple(records)
    places = _places(records)
    chosen = [_middle(places)]
    nearest = [_distance(records, places, i, chosen[0]) for i in range(len(records))]
    while len(chosen) < n:
        far = max(range(len(records)), key=lambda i: (nearest[i], -i))
        chosen.append(far)
        nearest = [min(have, _distance(records, places, i, far)) for i, have in enumerate(nearest)]
    return tuple(records[i] for i in sorted(chosen))


def _places(records: Sequence[CaptureRecord]) -> list[tuple[float, float]]:
    """Layer and step of each capture, as fractions of all layers and steps that occur."""
    layers = {name: i for i, name in enumerate(dict.fromkeys(r.layer for r in records))}
    last_layer = max(1, len(layers) - 1)
    last_step = max(1, *(r.step for r in records))
    return [(layers[r.layer] / last_layer, r.step / last_step) for r in records]


def _middle(places: Sequence[tuple[float, float]]) -> int:
    return min(range(len(places)), key=lambda i: abs(places[i][0] - 0.5) + abs(places[i][1] - 0.5))


def _distance(
    records: Sequence[CaptureRecord], places: Sequence[tuple[float, float]], a: int, b: int
) -> float:
    if a == b:
        return -1.0
    (layer_a, step_a), (layer_b, step_b) = places[a], places[b]
    apart = ((layer_a - layer_b) ** 2 + (step_a - step_b) ** 2) ** 0.5
    return apart + (_OTHER_SHAPE if records[a].shape != records[b].shape else 0.0)
