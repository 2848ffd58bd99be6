"""A few captures that stand for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.capture.selection.reduce import pick
from sage_plugin.errors import UsageError
from tests.capture.toys import line, shape


def grid(layers: int, steps: int, **changes):
    return tuple(
        line(layer=f"b.{i}.attn", step=s, **changes) for s in range(steps) for i in range(layers)
    )


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 60))
def test_that_many_distinct_ones_in_their_order(layers, steps, n):
    records = grid(layers, steps)
    chosen = pick(records, n)
    assert len(chosen) == min(n, len(records))
    positions = [records.index(record) for record in chosen]
    assert positions == sorted(set(positions))


def test_every_shape_comes_before_any_comes_twice():
    others = (line(layer=f"c.{n}", shape=shape(seq_k=n)) for n in (7, 9))
    records = (*grid(4, 4), *others)
    assert len({record.shape for record in pick(records, 3)}) == 3


def test_layers_and_steps_are_spread():
    chosen = pick(grid(10, 10), 5)
    assert len({record.layer for record in chosen}) >= 3
    assert max(record.step for record in chosen) - min(record.step for record in chosen) >= 8


def test_one_is_from_the_middle():
    (only,) = pick(grid(5, 5), 1)
    assert (only.layer, only.step) == ("b.2.attn", 2)


def test_nonsense_is_refused():
    with pytest.raises(UsageError):
        pick(grid(1, 1), 0)
