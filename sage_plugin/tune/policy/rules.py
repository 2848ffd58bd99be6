"""From what was chosen in each cell to the rules of a policy file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sage_plugin.plugin.policy.rules import HOST, Rule
from sage_plugin.tune.policy.estimates import CellEstimates, Estimate
from sage_plugin.tune.policy.grid import Grid, Place
from sage_plugin.tune.policy.option import Option


@dataclass(frozen=True, slots=True)
class Chosen:
    """A cell and the estimate that was chosen for it."""

    cell: CellEstimates
    pick: Estimate

    @property
    def saved_ms(self) -> float:
        """Milliseconds saved in a run over the host's attention."""
        return self.cell.estimates[0].ms - self.pick.ms


def rules_of(grid: Grid, chosen: Sequence[Chosen], options: Iterable[Option]) -> tuple[Rule, ...]:
    """Rules that say the same as the choice, layers and bands of one option joined.

    What stays with the host's attention needs no rule. Rules never overlap, so that their order
    does not matter; the greatest saving comes first.
    """
    by_label = {option.label: option for option in options}
    at = {one.cell.place: one for one in chosen}
    groups: dict[tuple[str, int, int], list[Chosen]] = {}
    for layer in range(len(grid.layers)):
        for label, first, last in _runs(at, layer, len(grid.bands)):
            members = [at[layer, band] for band in range(first, last + 1) if (layer, band) in at]
            groups.setdefault((label, first, last), []).extend(members)
    rules = [
        _rule(by_label[label], grid, first, last, members)
        for (label, first, last), members in groups.items()
    ]
    return tuple(sorted(rules, key=lambda rule: -(rule.saved_ms or 0.0)))


def _runs(at: Mapping[Place, Chosen], layer: int, bands: int) -> Iterator[tuple[str, int, int]]:
    """Unbroken bands of a layer with one option: its label, the first and the last band.

    A band without calls does not break one.
    """
    label, first, last = HOST, 0, 0
    for band in range(bands):
        one = at.get((layer, band))
        if one is None:
            continue
        if one.pick.label != label:
            if label != HOST:
                yield label, first, last
            label, first = one.pick.label, band
        last = band
    if label != HOST:
        yield label, first, last


def _rule(option: Option, grid: Grid, first: int, last: int, members: Sequence[Chosen]) -> Rule:
    shapes = [shape for one in members for shape, _ in one.cell.cell.calls]
    begin = grid.bands[first].partition(":")[0]
    end = grid.bands[last].partition(":")[2]
    return Rule(
        kernel=option.name,
        layers=tuple(dict.fromkeys(one.cell.cell.layer for one in members)),
        steps=f"{begin}:{end}" if begin or end else "",
        # Much shorter calls than those that were measured are not what was chosen for.
        min_seq=max(grid.min_seq, min(min(shape.seq_q, shape.seq_k) for shape in shapes) // 2),
        launch=option.fields,
        saved_ms=round(sum(one.saved_ms for one in members), 4),
        error=round(max(one.pick.error for one in members), 6),
        captures=tuple(sorted({file for one in members for file in one.pick.captures})),
    )
