"""A grid of tests of which every run takes each pair of values once, and a sweep the rest."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

Value = tuple[str, Any]


def pairwise(**axes: dict[str, Any] | list[Any] | tuple[Any, ...]) -> pytest.MarkDecorator:
    """Run a test on the product of its axes; cases beyond an all-pairs design are marked `sweep`.

    Args:
        axes: values of each parameter, by their labels or labeled by themselves.
    """
    labeled = [
        list(values.items()) if isinstance(values, dict) else [(_label(x), x) for x in values]
        for values in axes.values()
    ]
    grid = list(itertools.product(*labeled))
    chosen = _all_pairs(grid)
    cases = [
        pytest.param(
            *(value for _, value in case),
            id="-".join(label for label, _ in case),
            marks=[] if at in chosen else pytest.mark.sweep,
        )
        for at, case in enumerate(grid)
    ]
    return pytest.mark.parametrize(list(axes), cases)


def _label(value: Any) -> str:
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value).removeprefix("torch.")


def _all_pairs(grid: list[tuple[Value, ...]]) -> set[int]:
    """Choose places of a grid, greedily, until each pair of labels of two axes is in one."""
    pairs_of = [
        frozenset(itertools.combinations([(axis, label) for axis, (label, _) in enumerate(case)],
                                         min(2, len(case))))
        for case in grid
    ]  # fmt: skip
    missing = set().union(*pairs_of)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(grid)), key=lambda at: len(pairs_of[at] & missing))
        chosen.add(best)
        missing -= pairs_of[best]
    return chosen
