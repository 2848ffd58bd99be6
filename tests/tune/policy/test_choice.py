"""What is chosen, against trying every assignment."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.errors import TuningError
from sage_plugin.tune.policy.choice import PolicyProblem
from sage_plugin.tune.policy.grid import Estimate
from tests.tune.policy import recordings

LABELS = ("sage", "fav3_sage", "fav3_fp8")
ESTIMATES = st.lists(
    st.tuples(st.integers(1, 20).map(lambda n: n / 100), st.integers(1, 60).map(lambda n: n / 10)),
    max_size=3,
)


def problem_of(rows, *, weights=None, total=None, max_layer_error=0.15, host=4.0):
    """Cells of one call a step, with (error, ms) of the options in each."""
    grid = recordings.grid(len(rows), ("",), None)
    weights = weights or [1.0] * len(rows)
    cells = tuple(
        dataclasses.replace(cell, weight=weight, estimates=(
            Estimate("sdpa", 0.0, host),
            *(Estimate(label, *row) for label, row in zip(LABELS, given, strict=False)),
        ))
        for cell, given, weight in zip(grid.cells.values(), rows, weights, strict=True)
    )  # fmt: skip
    return PolicyProblem(cells, total or float(len(cells)), max_layer_error)


def every(problem):
    """Milliseconds and mean error of all assignments that the cap of a layer allows."""
    allowed = [
        [e for e in one.estimates if e.error <= problem.max_layer_error] for one in problem.cells
    ]
    for choice in itertools.product(*allowed):
        error = sum(
            e.error * cell.weight * cell.calls_per_run / problem.total_calls
            for e, cell in zip(choice, problem.cells, strict=True)
        )
        yield sum(e.ms for e in choice), error


@settings(max_examples=100)
@given(
    rows=st.lists(ESTIMATES, min_size=1, max_size=4),
    budget=st.integers(1, 30).map(lambda n: n / 200),
    weights=st.lists(st.integers(1, 8).map(lambda n: n / 4), min_size=4, max_size=4),
)
def test_the_most_that_can_be_saved_within_the_error(rows, budget, weights):
    problem = problem_of(rows, weights=weights[: len(rows)], total=len(rows) + 1.0)
    # Sums of the same shares may differ in their last bit.
    best = min(ms for ms, error in every(problem) if error <= budget * (1 + 1e-9))
    host = 4.0 * len(rows)
    try:
        found = problem.most_saved(budget)
    except TuningError:
        assert best > host - 0.01 or best >= min(
            ms for ms, error in every(problem) if error <= budget * 0.999
        )
        return
    assert found.error <= budget * (1 + 1e-9)
    assert found.ms >= best - 1e-9
    assert found.ms - found.slack <= best + 1e-6
    assert found.ms <= min(ms for ms, error in every(problem) if error <= budget * 0.999) + 1e-9
    assert all(pick.error <= 0.15 for pick in found.picks)
    assert any(
        abs(ms - found.ms) < 1e-9 and abs(error - found.error) < 1e-9
        for ms, error in every(problem)
    )


@settings(max_examples=100)
@given(rows=st.lists(ESTIMATES, min_size=1, max_size=4), percent=st.integers(20, 99))
def test_the_least_error_within_a_time(rows, percent):
    problem = problem_of(rows)
    limit = problem.baseline_ms * percent / 100 + 0.003
    fits = [error for ms, error in every(problem) if ms <= limit]
    if not fits:
        with pytest.raises(TuningError, match="the fastest choice takes"):
            problem.least_error(limit)
        return
    found = problem.least_error(limit)
    assert found.ms <= limit * (1 + 1e-9)
    assert found.error >= min(fits) - 1e-9
    assert found.error - found.slack <= min(fits) + 1e-9


def test_where_the_cap_of_a_layer_binds_the_next_kernel_is_taken():
    rows = [[(0.01, 3.0), (0.14, 1.0)], [(0.01, 3.0), (0.16, 1.0)]]
    found = problem_of(rows).most_saved(1.0)
    assert [pick.label for pick in found.picks] == ["fav3_sage", "sage"]
    wide = problem_of(rows, max_layer_error=0.16).most_saved(1.0)
    assert [pick.label for pick in wide.picks] == ["fav3_sage", "fav3_sage"]


def test_calls_outside_of_the_cells_count_with_no_error():
    problem = problem_of([[(0.1, 1.0)]], total=4.0)
    found = problem.most_saved(0.03)
    assert (found.error, found.ms) == (pytest.approx(0.025), 1.0)
    with pytest.raises(TuningError):
        problem_of([[(0.1, 1.0)]], total=1.0).most_saved(0.03)


def test_weights_move_the_budget_to_where_the_clip_loses_least():
    rows = [[(0.05, 1.0)], [(0.05, 1.0)]]
    even = problem_of(rows, weights=[0.5, 1.5]).most_saved(0.02)
    assert [pick.label for pick in even.picks] == ["sage", "sdpa"]
    assert even.error == pytest.approx(0.0125)


def test_a_budget_that_nothing_meets_says_what_would():
    with pytest.raises(TuningError, match=r"--max-error 0.001: .*the least that does has 0.02"):
        problem_of([[(0.04, 1.0)], [(0.05, 1.0)]]).most_saved(0.001)


def test_where_no_kernel_is_faster_that_is_said():
    with pytest.raises(TuningError, match="no kernel is faster here"):
        problem_of([[(0.04, 5.0)], [(0.05, 4.0)]]).most_saved(0.1)


@pytest.mark.parametrize("rows", [[[(0.2, 1.0)], [(0.3, 1.0)]], [[], []]])
def test_where_the_cap_or_the_gate_leaves_nothing_that_is_said(rows):
    """Not that no kernel is faster, which would send people the wrong way."""
    with pytest.raises(TuningError, match="--max-layer-error"):
        problem_of(rows).most_saved(0.1)


def test_a_time_that_the_hosts_attention_keeps_needs_no_policy():
    with pytest.raises(TuningError, match=r"--max-ms 8.*host's attention"):
        problem_of([[(0.01, 1.0)], [(0.01, 1.0)]]).least_error(8.0)


def test_one_option_everywhere_stays_with_the_host_where_it_may_not_run():
    problem = problem_of([[(0.01, 3.0), (0.2, 1.0)], [(0.02, 2.0)]])
    assert problem.single("sdpa") == (8.0, 0.0)
    assert problem.single("sage") == (5.0, pytest.approx(0.015))
    assert problem.single("fav3_sage") == (5.0, pytest.approx(0.1))
    assert problem.baseline_ms == 8.0


@settings(max_examples=60)
@given(rows=st.lists(ESTIMATES, min_size=1, max_size=12))
def test_the_front_goes_from_no_error_to_the_fastest(rows):
    problem = problem_of(rows)
    front = problem.front()
    fastest = sum(min(e.ms for e in one.estimates if e.error <= 0.15) for one in problem.cells)
    assert (front[0].ms, front[0].error) == (pytest.approx(problem.baseline_ms), 0.0)
    assert front[-1].ms == pytest.approx(fastest)
    assert all(a.ms > b.ms for a, b in itertools.pairwise(front))
    for one in front if len(rows) <= 4 else ():  # all choices of more are too many to list
        dominated = [ms for ms, error in every(problem) if error <= one.error * 0.99]
        assert one.ms <= min(dominated, default=one.ms) + 1e-9


def test_the_front_of_many_cells_reaches_the_fastest_too():
    rows = [[(0.01 + (i % 7) / 1000, 3.0), (0.05 + (i % 5) / 1000, 1.0)] for i in range(120)]
    front = problem_of(rows).front()
    assert front[-1].ms == pytest.approx(120.0)
    assert len(front) > 8


def test_an_assignment_is_the_sum_of_its_picks():
    rows = [[(0.01, 3.0)], [(0.02, 2.5), (0.03, 2.0)], []]
    found = problem_of(rows).most_saved(0.5)
    assert found.ms == pytest.approx(sum(pick.ms for pick in found.picks))
    assert found.error == pytest.approx((0.01 + 0.03) / 3)
    assert found.slack == pytest.approx(0.0)
    assert dataclasses.astuple(found.picks[2])[:3] == ("sdpa", 0.0, 4.0)
