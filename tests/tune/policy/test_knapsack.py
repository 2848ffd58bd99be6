"""The knapsack against trying every choice."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.tune.policy import knapsack
from sage_plugin.tune.policy.knapsack import solve, sum_of

WEIGHTS = st.integers(0, 64).map(lambda n: n / 64)
VALUES = st.integers(-64, 64).map(lambda n: n / 16)
GROUPS = st.lists(
    st.lists(st.tuples(VALUES, WEIGHTS), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def best(groups, capacity):
    """The greatest value of all choices that fit, `None` where none does."""
    values = [
        sum(value for value, _ in choice)
        for choice in itertools.product(*groups)
        if sum(weight for _, weight in choice) <= capacity
    ]
    return max(values, default=None)


@settings(max_examples=150)
@given(
    groups=GROUPS,
    capacity=st.integers(0, 256).map(lambda n: n / 64),
    grid=st.none() | st.integers(1, 40),
)
def test_what_is_chosen_fits_and_lies_between_the_rounded_optimum_and_the_bound(
    groups, capacity, grid
):
    exact = best(groups, capacity)
    found = solve(groups, capacity, grid=grid)
    assert (found is None) == (exact is None)
    if found is None:
        return
    picks, bound = found
    _, value, weight = sum_of(groups, picks)
    assert weight <= capacity
    assert value <= exact <= bound + 1e-9
    # Rounding costs a group less than one step of the grid.
    room = capacity - sum(min(weight for _, weight in group) for group in groups)
    assert value >= best(groups, capacity - room * min(1, len(groups) / (grid or knapsack.GRID)))


@settings(max_examples=60)
@given(groups=GROUPS, wanted=st.integers(-64, 256).map(lambda n: n / 64))
def test_the_dual_question_is_the_same_with_value_and_weight_exchanged(groups, wanted):
    """Least weight for a value: the shortfall below each group's best is what must fit."""
    most = [max(value for value, _ in group) for group in groups]
    turned = [
        [(-weight, top - value) for value, weight in group]
        for group, top in zip(groups, most, strict=True)
    ]
    found = solve(turned, sum(most) - wanted)
    lightest = min(
        (
            sum(weight for _, weight in choice)
            for choice in itertools.product(*groups)
            if sum(value for value, _ in choice) >= wanted
        ),
        default=None,
    )
    assert (found is None) == (lightest is None)
    if found is not None:
        picks, bound = found
        _, value, weight = sum_of(groups, picks)
        assert value >= wanted
        assert -bound - 1e-9 <= lightest <= weight


def test_without_room_the_best_of_the_lightest_is_taken():
    groups = [
        [(1.0, 0.5), (3.0, 0.5), (9.0, 0.6)],
        [(-2.0, 0.0), (-1.0, 0.0)],
    ]
    assert solve(groups, 0.5) == ((1, 1), 2.0)


def test_nothing_fits_below_the_lightest():
    assert solve([[(1.0, 2.0)], [(1.0, 1.0)]], 2.99) is None
    assert solve([[(1.0, 2.0)], [(1.0, 1.0)]], 3.0) == ((0, 0), 2.0)


def test_a_value_below_none_is_chosen_only_where_it_must_be():
    assert solve([[(0.0, 0.0), (-1.0, 0.0)]], 1.0)[0] == (0,)
    assert solve([[(-5.0, 0.0), (-1.0, 2.0)]], 1.0)[0] == (0,)


def test_many_groups_lose_next_to_nothing_and_the_bound_says_so():
    groups = [
        [(0.0, 0.0)]
        + [(1 + ((7 * i + 3 * j) % 11) / 10, 0.01 + ((5 * i + j) % 13) / 500)
           for j in range(4)]
        for i in range(150)
    ]  # fmt: skip
    picks, bound = solve(groups, 1.7)
    _, value, weight = sum_of(groups, picks)
    assert weight <= 1.7
    assert 0 <= bound - value < 0.005 * value


@pytest.mark.parametrize("scale", [1e-12, 1e9])
def test_the_unit_does_not_matter(scale):
    groups = [[(0.0, 0.0), (i + 1.0, scale * (i + 2))] for i in range(5)]
    picks, _ = solve(groups, scale * 11.01)
    assert sum_of(groups, picks)[1] == best(groups, scale * 11.01) == 9.0


def test_the_bound_is_that_of_parts():
    """Half of the second alternative fits: 6 + 5/2."""
    groups = [
        [(0.0, 0.0), (6.0, 2.0)],
        [(0.0, 0.0), (5.0, 2.0)],
    ]
    assert solve(groups, 3.0) == ((1, 0), 8.5)
    assert math.isclose(solve(groups, 100.0)[1], 11.0)
