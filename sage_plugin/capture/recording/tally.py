"""Counts every call of a recording, saved or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from sage_plugin.capture.recording.run_steps import RunSteps
from sage_plugin.capture.store.manifest import CallCounts, LayerCalls, ShapeCount
from sage_plugin.schema import ATTENTION, SCHEMA_VERSION, AnyShape

MAX_SHAPES = 1000
"""Distinct shapes that are told apart; a growing cache would bring a new one with each token."""


class Tally:
    """Running counts by layer, shape and reason."""

    def __init__(self) -> None:
        self.layers: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._shapes: Counter[AnyShape] = Counter()
        self._families: dict[str, str] = {}
        self._cells: dict[tuple[str, AnyShape], Counter[int]] = {}

    def add(self, layer: str, reason: str, family: str = ATTENTION) -> None:
        """Count a call, and why it is in no capture (empty where it is)."""
        self.layers[layer] += 1
        if family != ATTENTION:
            self._families[layer] = family
        if reason:
            self.skipped[reason] += 1

    def add_shape(self, shape: AnyShape) -> None:
        """Count a call's shape."""
        if shape in self._shapes or len(self._shapes) < MAX_SHAPES:
            self._shapes[shape] += 1

    def add_cell(self, layer: str, shape: AnyShape, step: int | None) -> None:
        """Count a call of a layer at a denoising step."""
        if shape in self._shapes:
            self._cells.setdefault((layer, shape), Counter())[step or 0] += 1

    def counts(
        self, steps: Mapping[str, int], denoising: RunSteps, *, complete: bool
    ) -> CallCounts:
        """The counts as they are written."""
        shapes = self._shapes.most_common()
        number = {shape: i for i, (shape, _) in enumerate(shapes)}
        return CallCounts(
            schema_version=SCHEMA_VERSION,
            complete=complete,
            layers=dict(self.layers),
            steps=dict(steps),
            shapes=tuple(ShapeCount(shape, calls) for shape, calls in shapes),
            skipped=dict(self.skipped.most_common()),
            denoising_steps=denoising.steps,
            runs=denoising.runs,
            layer_calls=tuple(self._layer_calls(number)),
            families=dict(self._families),
        )

    def _layer_calls(self, number: Mapping[AnyShape, int]) -> Iterator[LayerCalls]:
        for (layer, shape), by_step in self._cells.items():
            calls = tuple(by_step[step] for step in range(max(by_step) + 1))
            yield LayerCalls(layer, number[shape], calls)
