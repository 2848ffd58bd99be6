"""Which calls to keep, so that at most N of them spread over layers and denoising steps.

Where the number of steps is known, the selection is computed beforehand (`_planned`): steps and
layers in equal strata, paired in golden-ratio order so that early steps do not mean early layers.

Where it is not, every call has a rank that depends on nothing but its own place, and kept is what
ranks best among the calls seen so far. Three orders make any such selection even: the n-th step
ranks by the powers of two that divide n (as a run goes on, every step is kept, then every second,
every fourth, ...); the first layer of a step moves with the radical inverse of n in base 3, which
is coprime with 2, so that each of those strides visits all layers (the Halton sequence); and
further layers of the same step follow in bit-reversed order.

In either case a shape's first call comes in whatever its place: no shape has two captures while
another that was seen has none. In a planned run it stands in for the nearest planned call, which
takes its place back if it turns out to have the same shape.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from sage_plugin.capture.selection.steps import StepSelection
from sage_plugin.errors import UsageError
from sage_plugin.plugin.context import layer_form

NOT_SELECTED_LAYER = "layer not selected"
NOT_SELECTED_STEP = "step not selected"
NOT_IN_SPREAD = "not needed for an even spread"
ALREADY_KEPT = "already kept"
ENOUGH_OF_SHAPE = "its shape has as many captures as asked for"
MORE_SHAPES = "more shapes than captures"

_PATIENCE_STEPS = 3
_GOLDEN = 0.6180339887498949

_Rank = tuple[int, int, float, int]


@dataclass(frozen=True, slots=True)
class CaptureCell:
    """The place of one attention call.

    Attributes:
        layer: module path of the attention.
        step: forward of the component, from 0.
        call_index: which attention call of that layer in that step.
    """

    layer: str
    step: int
    call_index: int = 0


@dataclass(frozen=True, slots=True)
class CaptureVerdict:
    """What to do with a call.

    Attributes:
        keep: save it.
        evict: the saved call that has to go first, or `None`.
        instead_of: the planned call that did not come and whose place this one takes, or `None`.
        reason: why it is not kept; empty where it is.
    """

    keep: bool
    evict: CaptureCell | None = None
    instead_of: CaptureCell | None = None
    reason: str = ""


class SpreadPolicy:
    """Chooses at most `max_captures` calls, spread over layers and steps, while they come in.

    Example:
        >>> policy = SpreadPolicy(max_captures=2)
        >>> policy.add_layers(["a.0", "a.1"])
        >>> for cell in (CaptureCell("a.0", 0), CaptureCell("a.1", 0)):
        ...     policy.commit(cell, policy.judge(cell))
        >>> policy.judge(CaptureCell("a.0", 1)).evict
        CaptureCell(layer='a.1', step=0, call_index=0)
    """

    def __init__(
        self,
        max_captures: int,
        *,
        steps: StepSelection | None = None,
        total_steps: int | None = None,
        per_shape: int | None = None,
    ) -> None:
        if max_captures < 1:
            raise UsageError(f"max_captures: got {max_captures}, expected at least 1")
        if per_shape is not None and per_shape < 1:
            raise UsageError(f"per_shape: got {per_shape}, expected at least 1 or None")
        if total_steps is not None and total_steps < 1:
            raise UsageError(f"total_steps: got {total_steps}, expected at least 1 or None")
        self.max_captures = max_captures
        self.per_shape = per_shape
        self._steps = steps or StepSelection()
        self._total = total_steps
        self._layers: list[str] = []
        self._position: dict[str, int] = {}
        self._offset_rank: list[int] = []
        self._kept: dict[CaptureCell, _Rank] = {}
        self._shape_of: dict[CaptureCell, Hashable] = {}
        self._of_shape: defaultdict[Hashable, dict[CaptureCell, None]] = defaultdict(dict)
        self._stand_ins: dict[CaptureCell, CaptureCell] = {}
        self._plan: set[CaptureCell] | None = None

    @property
    def kept(self) -> tuple[CaptureCell, ...]:
        """The calls that are kept now."""
        return tuple(self._kept)

    @property
    def total_steps(self) -> int | None:
        """The announced number of steps."""
        return self._total

    def add_layers(self, layers: Iterable[str]) -> None:
        """Make layers known, in model order; layers of one kind are spread over the depth."""
        new = [name for name in dict.fromkeys(layers) if name not in self._position]
        if not new:
            return
        self._layers += new
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(map(layer_form, self._layers)))}
        ordered = sorted(self._layers, key=lambda name: kinds[layer_form(name)])
        self._position = {name: i for i, name in enumerate(ordered)}
        self._offset_rank = _bit_reversed_ranks(len(ordered))
        self._kept = {cell: self._rank(cell) for cell in self._kept}
        self._plan = None

    def expect(self, total_steps: int | None) -> None:
        """Announce how many steps the run has; a wrong number costs evenness, never a limit."""
        self._total = total_steps
        self._plan = None
        self._stand_ins.clear()

    def refusal(self, cell: CaptureCell) -> str:
        """Why a call is out of the question, empty where it is a candidate."""
        if cell.layer not in self._position:
            return NOT_SELECTED_LAYER
        if cell.step not in self._steps:
            return NOT_SELECTED_STEP
        return ALREADY_KEPT if cell in self._kept else ""

    def judge(self, cell: CaptureCell, shape: Hashable = None) -> CaptureVerdict:
        """Decide on one call; `commit` tells that the decision was carried out."""
        reason = self.refusal(cell)
        if reason:
            return CaptureVerdict(False, reason=reason)
        plan = self._plan_of(cell)
        own = self._of_shape.get(shape)
        if not own:
            return self._first_of_shape(cell, plan)
        full = self.per_shape is not None and len(own) >= self.per_shape
        if plan is not None:
            return self._judge_planned(cell, plan, own, full)
        if not full and len(self._kept) < self.max_captures:
            return CaptureVerdict(True)
        spare = own if full else itertools.chain(own, self._spare())
        worst = max(spare, key=self._kept.__getitem__)
        if self._rank(cell) >= self._kept[worst]:
            return CaptureVerdict(False, reason=ENOUGH_OF_SHAPE if full else NOT_IN_SPREAD)
        return CaptureVerdict(True, evict=worst)

    def commit(self, cell: CaptureCell, verdict: CaptureVerdict, shape: Hashable = None) -> None:
        """Take note that a call was saved as `judge` decided."""
        if verdict.evict is not None:
            del self._kept[verdict.evict]
            del self._of_shape[self._shape_of.pop(verdict.evict)][verdict.evict]
        self._kept[cell], self._shape_of[cell] = self._rank(cell), shape
        self._of_shape[shape][cell] = None
        if verdict.instead_of is not None:
            self._stand_ins[verdict.instead_of] = cell
        if self._plan is not None:
            self._plan -= {verdict.instead_of, verdict.evict}
            self._plan.add(cell)

    def _plan_of(self, cell: CaptureCell) -> set[CaptureCell] | None:
        """The even selection that a call may be part of; `None` beyond the announced steps."""
        if self._total is None or cell.step >= self._total:
            return None
        if self._plan is None:
            self._plan = self._planned(self._total)
        return self._plan

    def _judge_planned(
        self, cell: CaptureCell, plan: set[CaptureCell], own: dict[CaptureCell, None], full: bool
    ) -> CaptureVerdict:
        """Keep a planned call, and an unplanned one in place of a planned one that did not come."""
        if (stand_in := self._stand_ins.get(cell)) in own:
            return CaptureVerdict(True, evict=stand_in)
        if full:
            return CaptureVerdict(False, reason=ENOUGH_OF_SHAPE)
        if cell in plan:
            return CaptureVerdict(True)
        missed = self._missed(cell, plan)
        if missed is None and len(plan) >= self.max_captures:
            return CaptureVerdict(False, reason=NOT_IN_SPREAD)
        return CaptureVerdict(True, instead_of=missed)

    def _first_of_shape(self, cell: CaptureCell, plan: set[CaptureCell] | None) -> CaptureVerdict:
        """Keep the first call of a shape, in place of what another shape has too much of."""
        if len(self._kept) >= self.max_captures:
            worst = max(self._spare(), key=self._kept.__getitem__, default=None)
            if worst is None:
                return CaptureVerdict(False, reason=MORE_SHAPES)
            return CaptureVerdict(True, evict=worst)
        if plan is None or cell in plan or len(plan) < self.max_captures:
            return CaptureVerdict(True)
        waiting = plan - self._kept.keys()
        place = min(waiting, key=lambda p: (abs(p.step - cell.step), p.layer, p.call_index))
        return CaptureVerdict(True, instead_of=place)

    def _spare(self) -> Iterator[CaptureCell]:
        """The kept calls that are not the only one of their shape."""
        return (cell for cells in self._of_shape.values() if len(cells) > 1 for cell in cells)

    def _missed(self, cell: CaptureCell, plan: set[CaptureCell]) -> CaptureCell | None:
        """A planned call that this one may replace: of the same layer, or long overdue."""
        overdue = [
            p
            for p in plan
            if p.step < cell.step - (0 if p.layer == cell.layer else _PATIENCE_STEPS)
            and p not in self._kept
        ]
        return min(overdue, key=lambda p: (p.layer != cell.layer, p.step, p.layer), default=None)

    def _planned(self, total: int) -> set[CaptureCell]:
        """The even selection for a known number of steps; what is kept already takes its place."""
        steps = [step for step in range(total) if step in self._steps]
        layers = sorted(self._layers, key=self._position.__getitem__)
        count = min(self.max_captures, len(steps) * len(layers))
        turns = sorted(range(count), key=lambda i: (i + 1) * _GOLDEN % 1.0)
        plan: set[CaptureCell] = set()
        for slot, turn in enumerate(turns):
            step = steps[_stratum(slot, count, len(steps))]
            first = _stratum(turn, count, len(layers))
            around = (
                CaptureCell(layers[(first + i) % len(layers)], step) for i in range(len(layers))
            )
            plan.add(next(cell for cell in around if cell not in plan))
        new = sorted(plan - self._kept.keys(), key=lambda p: (p.step, p.layer))
        return set(self._kept) | set(new[: max(0, self.max_captures - len(self._kept))])

    def _rank(self, cell: CaptureCell) -> _Rank:
        """Order of keeping, best first; equal for no two cells of one step."""
        number = self._steps.count_below(cell.step) + 1
        layers = len(self._layers)
        level = (number & -number).bit_length() - 1
        start = int(_radical_inverse(number, 3) * layers)
        offset = (self._position[cell.layer] - start) % layers
        turn = self._offset_rank[offset] + layers * cell.call_index
        odd_part = _radical_inverse(number >> (level + 1), 2)
        return (turn or -level, -level, odd_part, number)


def _stratum(index: int, parts: int, size: int) -> int:
    """The middle of the `index`-th of `parts` equal parts of `size` places."""
    return (2 * index + 1) * size // (2 * parts)


def _radical_inverse(number: int, base: int) -> float:
    """The digits of `number` mirrored at the point: 1, 2, 3 in base 2 are 1/2, 1/4, 3/4."""
    value, weight = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        weight /= base
        value += digit * weight
    return value


def _bit_reversed_ranks(count: int) -> list[int]:
    """For each offset its place in the order that halves the largest gaps first."""
    points = 1 << max(0, count - 1).bit_length()
    order = dict.fromkeys(int(_radical_inverse(i, 2) * count) for i in range(points))
    ranks = [0] * count
    for rank, offset in enumerate(order):
        ranks[offset] = rank
    return ranks
