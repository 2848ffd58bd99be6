"""What each option would do in each cell, and which captures stand in for missing ones."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.tune.policy.estimates import estimated, neighbors, worst_of
from sage_plugin.tune.policy.grid import PolicyCell
from sage_plugin.tune.policy.option import Option
from tests.tune.policy import recordings
from tests.tune.policy.recordings import CROSS, SHAPE

OPTIONS = (Option("sage"), Option("fav3_fp8"))
BANDS = ("0:2", "2:3", "3:4")
TIMES = {SHAPE: {"sdpa": 4.0, "sage": 3.0, "fav3_fp8": 1.0}}


def errors(**by_label):
    return ("a.safetensors",), {"sage": 0.01, "fav3_fp8": 0.1, **by_label}


def table(found):
    return {
        one.place: {e.label: (round(e.error, 6), round(e.ms, 6)) for e in one.estimates}
        for one in found
    }


def test_times_are_those_of_all_calls_and_errors_those_of_one():
    grid = recordings.grid(1, BANDS, 4)
    found = estimated(grid, dict.fromkeys(grid.cells, errors()), TIMES, OPTIONS)
    assert table(found) == {
        (0, 0): {"sdpa": (0.0, 8.0), "sage": (0.01, 6.0), "fav3_fp8": (0.1, 2.0)},
        (0, 1): {"sdpa": (0.0, 4.0), "sage": (0.01, 3.0), "fav3_fp8": (0.1, 1.0)},
        (0, 2): {"sdpa": (0.0, 4.0), "sage": (0.01, 3.0), "fav3_fp8": (0.1, 1.0)},
    }
    assert found[0].of("sage").captures == ("a.safetensors",)


def test_several_shapes_of_a_cell_are_added_up_and_all_must_be_timed():
    grid = recordings.grid(1, ("",), None)
    cell = PolicyCell((0, 0), grid.layers[0], "", ((SHAPE, 3.0), (CROSS, 2.0)))
    grid = dataclasses.replace(grid, cells={(0, 0): cell})
    times = {**TIMES, CROSS: {"sdpa": 1.0, "sage": 0.5}}
    (found,) = estimated(grid, {(0, 0): errors()}, times, OPTIONS)
    assert {e.label: e.ms for e in found.estimates} == {"sdpa": 14.0, "sage": 10.0}
    assert cell.calls_per_run == 5.0
    assert estimated(grid, {(0, 0): errors()}, TIMES, OPTIONS) == ()


def test_an_option_that_is_out_in_one_capture_is_out_in_the_cell():
    grid = recordings.grid(1, ("",), None)
    (found,) = estimated(grid, {(0, 0): errors(sage="gate")}, TIMES, OPTIONS)
    assert [e.label for e in found.estimates] == ["sdpa", "fav3_fp8"]
    assert found.of("sage") == found.estimates[0]


def test_worst_of_is_the_greatest_error_or_a_reason():
    assert worst_of([0.1, 0.3, 0.2]) == 0.3
    assert worst_of([0.1, "no", 0.9, "never"]) == "no"


def test_a_cell_without_capture_takes_the_worst_of_its_neighbors():
    grid = recordings.grid(3, BANDS, 4)
    judged = {
        (0, 0): errors(sage=0.05),
        (2, 1): errors(fav3_fp8=0.12),
        (1, 2): (("b.safetensors",), errors(sage=0.02)[1]),
    }
    found = {one.place: one for one in estimated(grid, judged, TIMES, OPTIONS)}
    # (1, 1) lies between (1, 2) and (2, 1); (0, 0) is no neighbour of it.
    middle = found[1, 1]
    assert (middle.of("sage").error, middle.of("fav3_fp8").error) == (0.02, 0.12)
    assert sorted(middle.of("sage").captures) == ["a.safetensors", "b.safetensors"]
    assert found[1, 0].of("sage").error == 0.05
    assert found[0, 0].of("sage").error == 0.05
    assert found[0, 0].of("fav3_fp8").error == 0.1


def test_an_option_that_is_out_in_a_neighbor_is_out():
    grid = recordings.grid(2, ("",), None)
    (_, other) = estimated(grid, {(0, 0): errors(fav3_fp8="gate")}, TIMES, OPTIONS)
    assert [e.label for e in other.estimates] == ["sdpa", "sage"]


def test_a_layer_of_another_kind_is_no_neighbor_and_keeps_the_hosts_attention():
    grid = recordings.grid(2, ("",), None)
    grid = dataclasses.replace(grid, layers=(grid.layers[0], "transformer.blocks.1.attn2"))
    (_, other) = estimated(grid, {(0, 0): errors()}, TIMES, OPTIONS)
    assert [e.label for e in other.estimates] == ["sdpa"]


@given(
    captured=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1),
    place=st.tuples(st.integers(0, 3), st.integers(0, 2)),
)
def test_neighbors_are_the_nearest_captured_ones_on_each_side(captured, place):
    grid = recordings.grid(4, BANDS, 4)
    layer, band = place
    captured.discard(place)
    near = list(neighbors(grid, dict.fromkeys(captured), place))
    assert len(set(near)) == len(near)
    assert set(near) <= captured
    assert bool(near) == bool(captured)
    aligned = {p for p in captured if p[0] == layer or p[1] == band}
    for p in aligned:
        between = {
            q
            for q in aligned - {p}
            if (q[0] == p[0] == layer and (q[1] - band) * (p[1] - band) > 0
                and abs(q[1] - band) < abs(p[1] - band))
            or (q[1] == p[1] == band and (q[0] - layer) * (p[0] - layer) > 0
                and abs(q[0] - layer) < abs(p[0] - layer))
        }  # fmt: skip
        assert (p in near) == (not between)
    if not aligned:
        assert set(near) == captured


@pytest.mark.parametrize("place", [(0, 0), (2, 1)])
def test_a_captured_cell_takes_its_own_errors_alone(place):
    grid = recordings.grid(3, BANDS, 4)
    judged = dict.fromkeys(grid.cells, errors(sage=0.2)) | {place: errors(sage=0.001)}
    found = {one.place: one for one in estimated(grid, judged, TIMES, OPTIONS)}
    assert found[place].of("sage").error == 0.001
