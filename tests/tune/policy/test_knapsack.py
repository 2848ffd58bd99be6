"""The knapsack against trying every choice."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.tune.policy import knapsack
from sage_plugin.tune.policy.knapsack import Alternative, solve

WEIGHTS = st.integers(0, 64).map(lambda n: n / 64)
VALUES = st.integers(-64, 64).map(lambda n: n / 16)
GROUPS = st.lists(
    st.lists(st.builds(Alternative, VALUES, WEIGHTS), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def best(groups, capacity):
    """The greatest value of all choices that fit, `None` where none does."""
    values = [
        sum(one.value for one in choice)
        for choice in itertools.product(*groups)
        if sum(one.weight for one in choice) <= capacity
    ]
    return max(values, default=None)


@settings(deadline=None, max_examples=150)
@given(groups=GROUPS, capacity=st.integers(0, 256).map(lambda n: n / 64))
def test_what_is_chosen_fits_and_lies_between_the_rounded_optimum_and_the_bound(groups, capacity):
    exact = best(groups, capacity)
    found = solve(groups, capacity)
    assert (found is None) == (exact is None)
    if found is None:
        return
    chosen = [group[pick] for group, pick in zip(groups, found.picks, strict=True)]
    assert found.weight == sum(one.weight for one in chosen) <= capacity
    assert found.value == sum(one.value for one in chosen)
    assert found.value <= exact <= found.bound + 1e-9
    # Rounding costs a group less than one step of the grid.
    room = capacity - sum(min(one.weight for one in group) for group in groups)
    assert found.value >= best(groups, capacity - room * len(groups) / knapsack.GRID)


@settings(deadline=None, max_examples=60)
@given(
    groups=GROUPS,
    capacity=st.integers(0, 256).map(lambda n: n / 64),
    grid=st.integers(1, 40),
)
def test_a_coarse_grid_never_takes_more_than_fits(groups, capacity, grid):
    found = solve(groups, capacity, grid=grid)
    exact = best(groups, capacity)
    assert (found is None) == (exact is None)
    assert found is None or found.weight <= capacity
    assert found is None or found.value <= exact <= found.bound + 1e-9


@settings(deadline=None, max_examples=60)
@given(groups=GROUPS, wanted=st.integers(-64, 256).map(lambda n: n / 64))
def test_the_dual_question_is_the_same_with_value_and_weight_exchanged(groups, wanted):
    """Least weight for a value: the shortfall below each group's best is what must fit."""
    most = [max(one.value for one in group) for group in groups]
    turned = [
        [Alternative(-one.weight, top - one.value) for one in group]
        for group, top in zip(groups, most, strict=True)
    ]
    found = solve(turned, sum(most) - wanted)
    lightest = min(
        (
            sum(one.weight for one in choice)
            for choice in itertools.product(*groups)
            if sum(one.value for one in choice) >= wanted
        ),
        default=None,
    )
    assert (found is None) == (lightest is None)
    if found is not None:
        chosen = [group[pick] for group, pick in zip(groups, found.picks, strict=True)]
        assert sum(one.value for one in chosen) >= wanted
        assert -found.bound - 1e-9 <= lightest <= sum(one.weight for one in chosen)


def test_without_room_the_best_of_the_lightest_is_taken():
    groups = [
        [Alternative(1.0, 0.5), Alternative(3.0, 0.5), Alternative(9.0, 0.6)],
        [Alternative(-2.0, 0.0), Alternative(-1.0, 0.0)],
    ]
    found = solve(groups, 0.5)
    assert (found.picks, found.value, found.weight, found.bound) == ((1, 1), 2.0, 0.5, 2.0)


def test_nothing_fits_below_the_lightest():
    assert solve([[Alternative(1.0, 2.0)], [Alternative(1.0, 1.0)]], 2.99) is None
    assert solve([[Alternative(1.0, 2.0)], [Alternative(1.0, 1.0)]], 3.0).value == 2.0


def test_a_value_below_none_is_chosen_only_where_it_must_be():
    assert solve([[Alternative(0.0, 0.0), Alternative(-1.0, 0.0)]], 1.0).picks == (0,)
    assert solve([[Alternative(-5.0, 0.0), Alternative(-1.0, 2.0)]], 1.0).picks == (0,)


def test_many_groups_lose_next_to_nothing_and_the_bound_says_so():
    groups = [
        [Alternative(0.0, 0.0)]
        + [Alternative(1 + ((7 * i + 3 * j) % 11) / 10, 0.01 + ((5 * i + j) % 13) / 500)
           for j in range(4)]
        for i in range(150)
    ]  # fmt: skip
    found = solve(groups, 1.7)
    assert found.weight <= 1.7
    assert 0 <= found.bound - found.value < 0.005 * found.value


@pytest.mark.parametrize("scale", [1e-12, 1e9])
def test_the_unit_does_not_matter(scale):
    groups = [[Alternative(0.0, 0.0), Alternative(i + 1.0, scale * (i + 2))] for i in range(5)]
    assert solve(groups, scale * 11.01).value == best(groups, scale * 11.01) == 9.0


def test_the_bound_is_that_of_parts():
    """Half of the second alternative fits: 6 + 5/2."""
    groups = [
        [Alternative(0.0, 0.0), Alternative(6.0, 2.0)],
        [Alternative(0.0, 0.0), Alternative(5.0, 2.0)],
    ]
    found = solve(groups, 3.0)
    assert (found.value, found.bound) == (6.0, 8.5)
    assert math.isclose(solve(groups, 100.0).bound, 11.0)
