"""The text form of a step selection, and the ordinals that the spread is computed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.capture.selection.steps import StepSelection
from sage_plugin.errors import UsageError


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        (None, list(range(12))),
        ("0,5,10-14", [0, 5, 10, 11]),
        (" 3 , 1-2 ", [1, 2, 3]),
        ("9-", [9, 10, 11]),
        ("2-4,3-6,5", [2, 3, 4, 5, 6]),
        ("4-,1,6-8", [1, *range(4, 12)]),
        (7, [7]),
        ([3, 0, 3], [0, 3]),
    ],
)
def test_selected_steps(steps, chosen):
    selection = StepSelection.parse(steps)
    assert [n for n in range(12) if n in selection] == chosen


@pytest.mark.parametrize("steps", ["9" * 5000, f"0-{'9' * 5000}"], ids=len)
def test_absurd_numbers_are_refused_in_one_sentence(steps):
    with pytest.raises(UsageError, match="expected numbers and ranges"):
        StepSelection.parse(steps)


@pytest.mark.parametrize("steps", ["", "a", "1,,2", "5-2", "-3", "1-2-3", "1.5", [], [-1], [1.5]])
def test_nonsense_is_refused_in_one_sentence(steps):
    with pytest.raises(UsageError, match="steps"):
        StepSelection.parse(steps)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 50), st.integers(1, 7))
def test_count_below_is_the_number_of_selected_steps_before(numbers, step, every):
    selection = StepSelection.parse(numbers, every)
    selected = {n for n in numbers if n % every == 0}
    assert {n for n in range(41) if n in selection} == selected
    assert selection.count_below(step) == len({n for n in selected if n < step})


@pytest.mark.parametrize("every", [0, -2])
def test_every_zeroth_step_is_refused(every):
    with pytest.raises(UsageError, match=f"every: got {every}, expected at least 1"):
        StepSelection.parse(None, every)
