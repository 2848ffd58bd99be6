"""Counts every attention call of a recording, saved or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sage_plugin.capture.manifest import CallCounts, ShapeCount
from sage_plugin.schema import SCHEMA_VERSION, CallShape

MAX_SHAPES = 1000
"""Distinct shapes that are told apart; a growing cache would bring a new one with each token."""


class Tally:
    """Running counts by layer, shape and reason."""

    def __init__(self) -> None:
        self.layers: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._shapes: Counter[CallShape] = Counter()

    @property
    def total(self) -> int:
        """Attention calls seen."""
        return self.layers.total()

    def add(self, layer: str, reason: str) -> None:
        """Count a call, and why it is in no capture (empty where it is)."""
        self.layers[layer] += 1
        if reason:
            self.skipped[reason] += 1

    def add_shape(self, shape: CallShape) -> None:
        """Count a call's shape."""
        if shape in self._shapes or len(self._shapes) < MAX_SHAPES:
            self._shapes[shape] += 1

    def counts(self, steps: Mapping[str, int], *, complete: bool) -> CallCounts:
        """The counts as they are written."""
        return CallCounts(
            schema_version=SCHEMA_VERSION,
            complete=complete,
            layers=dict(self.layers),
            steps=dict(steps),
            shapes=tuple(ShapeCount(shape, calls) for shape, calls in self._shapes.most_common()),
            skipped=dict(self.skipped.most_common()),
        )
