"""The design of the grids that a GPU runs: each pair of values once, in few cases."""

from __future__ import annotations

import itertools

from tests.gpu.pairs import pairwise

AXES = {"a": [1, 2, 3], "b": {"x": True, "y": False}, "c": ["p", "q", "r", "s"]}


def test_each_pair_of_values_is_in_a_case_that_every_run_takes():
    cases = pairwise(**AXES).args[1]
    assert [case.values for case in cases] == list(
        itertools.product(AXES["a"], AXES["b"].values(), AXES["c"])
    )
    taken = [case.values for case in cases if not case.marks]
    assert len(taken) <= 13 < len(cases)
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(case.values[one], case.values[other]) for case in cases}
        assert {(values[one], values[other]) for values in taken} == pairs
