"""From what was chosen in each cell to the rules of a policy file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sage_plugin.plugin.policy.rules import BASELINES, Rule
from sage_plugin.schema import CallShape
from sage_plugin.tune.policy.grid import Estimate, Grid, Place, PolicyCell
from sage_plugin.tune.policy.option import Option

Picks = Sequence[tuple[PolicyCell, Estimate]]


def rules_of(grid: Grid, chosen: Picks, options: Iterable[Option]) -> tuple[Rule, ...]:
    """Write rules that say the same as the choice, layers and steps of one option joined.

    What stays with the baseline needs no rule. Rules never overlap, so that their order does not
    matter; the greatest saving comes first.
    """
    by_label = {option.label: option for option in options}
    at = {cell.place: (cell, pick) for cell, pick in chosen}
    groups: dict[tuple[str, int, int], list[tuple[PolicyCell, Estimate]]] = {}
    for layer in range(len(grid.layers)):
        for label, first, last in _runs(at, layer, len(grid.step_ranges), BASELINES[grid.op]):
            members = [at[layer, r] for r in range(first, last + 1) if (layer, r) in at]
            groups.setdefault((label, first, last), []).extend(members)
    rules = [
        _rule(by_label[label], grid, first, last, members)
        for (label, first, last), members in groups.items()
    ]
    return tuple(sorted(rules, key=lambda rule: -(rule.saved_ms or 0.0)))


def _runs(
    at: Mapping[Place, tuple[PolicyCell, Estimate]], layer: int, ranges: int, baseline: str
) -> Iterator[tuple[str, int, int]]:
    """Unbroken step ranges of a layer with one option: its label, the first and the last range.

    A range without calls does not break one.
    """
    label, first, last = baseline, 0, 0
    for number in range(ranges):
        if (layer, number) not in at:
            continue
        picked = at[layer, number][1].label
        if picked != label:
            if label != baseline:
                yield label, first, last
            label, first = picked, number
        last = number
    if label != baseline:
        yield label, first, last


def _rule(option: Option, grid: Grid, first: int, last: int, members: Picks) -> Rule:
    lengths = [
        min(shape.seq_q, shape.seq_k)
        for cell, _ in members
        for shape, _ in cell.calls
        if isinstance(shape, CallShape)
    ]
    begin = grid.step_ranges[first].partition(":")[0]
    end = grid.step_ranges[last].partition(":")[2]
    return Rule(
        kernel=option.name,
        layers=tuple(dict.fromkeys(cell.layer for cell, _ in members)),
        steps=f"{begin}:{end}" if begin or end else "",
        # Much shorter calls than those that were measured are not what was chosen for.
        min_seq=max(grid.min_seq, min(lengths) // 2) if lengths else 0,
        launch=option.fields,
        saved_ms=round(sum(cell.estimates[0].ms - pick.ms for cell, pick in members), 4),
        error=round(max(pick.error for _, pick in members), 6),
        captures=tuple(sorted({file for _, pick in members for file in pick.captures})),
        op=grid.op,
        rotation=option.rotation,
        smoothing=option.smoothing,
    )
