"""The cells that a policy chooses for: a layer in a range of denoising steps, with its calls.

A linear has one cell for all steps: the weight that it multiplies is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sage_plugin.capture.record import CaptureRecord
from sage_plugin.capture.store.manifest import CallCounts
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.errors import CaptureError
from sage_plugin.paged_records import PagedShape
from sage_plugin.plugin.policy.step_range import Band, equal_bands
from sage_plugin.schema import ATTENTION, AnyShape, CallShape, LinearShape

MOST_CALLS = 10**12
"""More calls than any recording sees."""

Place = tuple[int, int]
"""Number of the layer and of the step range, from 0."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One option in one cell.

    Attributes:
        label: the option, or the baseline of its op family.
        error: centred error of the worst head, or block of rows, of the worst capture, of one call.
        ms: of all calls of the cell in one run.
        captures: files of the captures behind the error.
    """

    label: str
    error: float
    ms: float
    captures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyCell:
    """One layer in one step range.

    Attributes:
        place: numbers of the layer and of the range.
        layer: module path, with the component in front.
        steps: the range as a policy writes it, empty for all.
        calls: shapes of its calls that a kernel may take, with their number in one run.
        records: the captures taken in it.
        estimates: what may run there, the baseline first; empty until it is estimated.
        weight: how much an error in it counts, 1 on average.
    """

    place: Place
    layer: str
    steps: str
    calls: tuple[tuple[AnyShape, float], ...]
    records: tuple[CaptureRecord, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    weight: float = 1.0

    @property
    def calls_per_run(self) -> float:
        """Its calls in one run that a kernel may take."""
        return sum(calls for _, calls in self.calls)

    @property
    def op(self) -> str:
        """Op family of its calls."""
        return self.calls[0][0].family

    def of(self, label: str) -> Estimate:
        """Return what an option does here; the baseline if it may not run."""
        return next((e for e in self.estimates if e.label == label), self.estimates[0])


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells of a recording.

    Attributes:
        layers: paths in the order of the model.
        step_ranges: as a policy writes them; one empty text if there are none.
        cells: by layer and step range; a layer without calls in a range has no cell there.
        steps: denoising steps of a run, `None` if none were counted.
        total_calls: calls of its op family in a run, those included that no kernel may take.
        min_seq: calls with fewer queries or keys are in no cell.
        op: op family of its layers.
    """

    layers: tuple[str, ...]
    step_ranges: tuple[str, ...]
    cells: dict[Place, PolicyCell]
    steps: int | None
    total_calls: float
    min_seq: int = 0
    op: str = ATTENTION

    @property
    def shapes(self) -> tuple[AnyShape, ...]:
        """Shapes of all calls that a kernel may take, the most expensive ones first."""
        cost: dict[AnyShape, float] = {}
        for cell in self.cells.values():
            for shape, calls in cell.calls:
                cost[shape] = cost.get(shape, 0.0) + calls * work(shape)
        return tuple(sorted(cost, key=lambda shape: -cost[shape]))

    @property
    def captured(self) -> dict[Place, PolicyCell]:
        """The cells that hold a capture."""
        return {place: cell for place, cell in self.cells.items() if cell.records}


def work(shape: AnyShape) -> int:
    """Count the query-key pairs of a call, hidden ones included, or the products of a linear."""
    return math.prod(sizes(shape))


def grid_of(
    captures: CaptureFolder, *, step_ranges: int, min_seq: int, op: str = ATTENTION
) -> Grid:
    """Sort the captures and the counted calls of an op family in a folder into cells.

    Raises:
        CaptureError: the folder has no calls by layer, or none that a kernel may take.
        UsageError: a number of bands that is not allowed.
    """
    counts = captures.call_counts
    if not counts.layer_calls:
        raise CaptureError(
            f"{captures.path} has no calls by layer and step, which a policy is searched by: "
            "record again with `sage capture`"
        )
    if not _plausible(counts):
        raise CaptureError(
            f"{captures.path} has counts of calls that no recording writes: record again with "
            "`sage capture`"
        )
    if op != ATTENTION:
        step_ranges, min_seq = 1, 0  # `patch` takes every call of theirs
    names = equal_bands(step_ranges, counts.denoising_steps)
    layers = tuple(counts.of(op))
    parsed = [Band.parse(name) for name in names]
    calls = _calls(counts, layers, parsed, min_seq)
    records: dict[Place, list[CaptureRecord]] = {}
    for record in captures.records:
        number = _range_at(parsed, record.denoising_step or 0, counts.denoising_steps)
        if record.family == op and record.layer in layers:
            records.setdefault((layers.index(record.layer), number), []).append(record)
    cells = {
        place: PolicyCell(
            place,
            layers[place[0]],
            names[place[1]],
            tuple(sorted(by_shape.items(), key=lambda item: -work(item[0]))),
            tuple(r for r in records.get(place, ()) if r.shape in by_shape),
        )
        for place, by_shape in sorted(calls.items())
    }
    if not any(cell.records for cell in cells.values()):
        raise CaptureError(
            f"{captures.path} has no capture of a call of at least {min_seq} queries and keys: "
            "shorter ones stay with the host's attention (--min-seq)"
        )
    total = sum(counts.of(op).values()) / max(1, counts.runs)
    return Grid(layers, names, cells, counts.denoising_steps, total, min_seq, op)


def _plausible(counts: CallCounts) -> bool:
    """Whether the numbers of a file from anywhere can be counts of calls of real shapes."""
    by_step = sum(n for row in counts.layer_calls for n in row.calls if n > 0)
    every = (size for one in counts.shapes for size in sizes(one.shape))
    return by_step <= counts.total <= MOST_CALLS and all(0 < size <= MOST_CALLS for size in every)


def sizes(shape: AnyShape) -> tuple[int, ...]:
    """Return the numbers that a call's work follows from."""
    if isinstance(shape, LinearShape):
        return shape.rows, shape.in_features, shape.out_features
    if isinstance(shape, PagedShape):  # counted beside others; no policy is of them
        return len(shape.q_lens), shape.heads_q, shape.max_keys
    return shape.batch, shape.heads_q, shape.seq_q, shape.seq_k


def _calls(
    counts: CallCounts, layers: Sequence[str], ranges: Sequence[Band], min_seq: int
) -> dict[Place, dict[AnyShape, float]]:
    """Calls in one run by place and shape, of those that a kernel may take."""
    found: dict[Place, dict[AnyShape, float]] = {}
    for row in counts.layer_calls:
        if row.layer not in layers or not 0 <= row.shape < len(counts.shapes):
            continue
        shape = counts.shapes[row.shape].shape
        if isinstance(shape, CallShape) and min(shape.seq_q, shape.seq_k) < min_seq:
            continue
        for step, calls in enumerate(row.calls):
            if calls <= 0:
                continue
            number = _range_at(ranges, step, counts.denoising_steps)
            by_shape = found.setdefault((layers.index(row.layer), number), {})
            by_shape[shape] = by_shape.get(shape, 0.0) + calls / max(1, counts.runs)
    return found


def _range_at(ranges: Sequence[Band], step: int, total: int | None) -> int:
    """Number of the range that a step lies in; the last one for a step past the end."""
    for number, steps in enumerate(ranges):
        if steps.contains(step, total):
            return number
    return len(ranges) - 1
