"""Captures and calls sorted into cells."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.capture.store.manifest import CallCounts, LayerCalls, ShapeCount
from sage_plugin.capture.store.reader import CaptureFolder, open_captures
from sage_plugin.errors import CaptureError, UsageError
from sage_plugin.plugin.policy.step_range import Band
from sage_plugin.tune.policy.grid import grid_of, work
from tests.bench.folders import record_of
from tests.tune.policy import recordings
from tests.tune.policy.recordings import CROSS, LAYERS, SHAPE

SHORT = dataclasses.replace(SHAPE, seq_q=8, seq_k=8)
LONG = dataclasses.replace(SHAPE, seq_q=128, seq_k=128)
SHAPES = (SHAPE, CROSS, SHORT)


def folder_of(counts, *records):
    """A folder in memory, with one capture of the first layer unless others are given."""
    first = dataclasses.replace(
        record_of(SHAPE, heads=(0, 1), batches=(0,)), layer=next(iter(counts.layers), "a")
    )
    return CaptureFolder("captures", records or (first,), counts, ())


def counts_of(layer_calls, steps, runs=1, **changes):
    layers = dict.fromkeys((row.layer for row in layer_calls), 0)
    for row in layer_calls:
        layers[row.layer] += sum(row.calls)
    base = CallCounts(
        layers=layers,
        shapes=tuple(ShapeCount(shape, 1) for shape in SHAPES),
        denoising_steps=steps,
        runs=runs,
        layer_calls=tuple(layer_calls),
    )
    return dataclasses.replace(base, **changes)


@settings(max_examples=80)
@given(data=st.data(), steps=st.integers(1, 60), bands=st.integers(1, 12), runs=st.integers(1, 3))
def test_every_call_of_a_run_is_in_exactly_one_cell(data, steps, bands, runs):
    each = st.lists(st.integers(0, 5), min_size=steps, max_size=steps)
    rows = [
        LayerCalls(layer, number, tuple(data.draw(each)))
        for layer in LAYERS
        for number in range(len(SHAPES))
    ]
    rows[0] = dataclasses.replace(rows[0], calls=(1,) * steps)
    grid = grid_of(folder_of(counts_of(rows, steps, runs)), step_ranges=bands, min_seq=16)
    assert len(grid.step_ranges) == min(bands, steps)
    parsed = [Band.parse(band) for band in grid.step_ranges]
    lengths = [sum(band.contains(step, steps) for step in range(steps)) for band in parsed]
    for step in range(steps):
        assert sum(band.contains(step, steps) for band in parsed) == 1
    # Bounds are whole percents, which move a bound by half a percent of the steps at most.
    assert max(lengths) - min(lengths) <= 2 + steps // 100
    for row in rows:
        for number, band in enumerate(parsed):
            want = sum(n for step, n in enumerate(row.calls) if band.contains(step, steps)) / runs
            cell = grid.cells.get((LAYERS.index(row.layer), number))
            have = dict(cell.calls).get(SHAPES[row.shape], 0.0) if cell else 0.0
            assert math.isclose(have, want if SHAPES[row.shape] != SHORT else 0.0)
    assert all(cell.calls_per_run > 0 for cell in grid.cells.values())
    assert math.isclose(grid.total_calls, sum(sum(row.calls) for row in rows) / runs)


def test_captures_lie_in_the_cell_of_their_layer_and_step(tmp_path):
    recordings.write(tmp_path / "c", {(0, 0): "normal", (0, 1): "normal", (2, 3): "normal"})
    grid = grid_of(open_captures(tmp_path / "c"), step_ranges=2, min_seq=16)
    assert {place: [r.denoising_step for r in cell.records] for place, cell in grid.captured.items()
    } == {(0, 0): [0, 1], (2, 1): [3]}  # fmt: skip
    assert set(grid.cells) == {(layer, band) for layer in range(3) for band in range(2)}
    assert (grid.layers, grid.step_ranges, grid.steps) == (LAYERS, (":50%", "50%:"), 4)
    assert grid.cells[1, 0].calls == ((SHAPE, 2.0 * recordings.PER_STEP),)
    assert grid.total_calls == 3 * 4 * recordings.PER_STEP


def test_calls_are_those_of_one_run(tmp_path):
    recordings.write(tmp_path / "c", runs=3, uncounted=9)
    grid = grid_of(open_captures(tmp_path / "c"), step_ranges=4, min_seq=16)
    assert {cell.calls_per_run for cell in grid.cells.values()} == {float(recordings.PER_STEP)}
    assert grid.total_calls == 3 * 4 * recordings.PER_STEP + 3


def test_a_model_without_timesteps_has_one_band(tmp_path):
    recordings.write(tmp_path / "c", {(1, 0): "normal"}, steps=None)
    grid = grid_of(open_captures(tmp_path / "c"), step_ranges=5, min_seq=16)
    assert (grid.step_ranges, grid.steps) == (("",), None)
    assert list(grid.captured) == [(1, 0)]
    assert grid.cells[0, 0].calls_per_run == recordings.PER_STEP


def test_short_calls_are_in_no_cell_and_shapes_come_the_most_expensive_first(tmp_path):
    recordings.write(tmp_path / "c", shapes=(SHAPE, SHORT, LONG, CROSS))
    captures = open_captures(tmp_path / "c")
    assert grid_of(captures, step_ranges=1, min_seq=16).shapes == (LONG, SHAPE, CROSS)
    assert grid_of(captures, step_ranges=1, min_seq=41).shapes == (LONG, SHAPE)
    assert [work(shape) for shape in (LONG, SHAPE, CROSS)] == [2 * 128**2, 2 * 64**2, 2 * 64 * 40]


def test_a_step_past_the_end_is_in_the_last_band():
    rows = [LayerCalls("a", 0, (1, 1, 1, 7))]
    grid = grid_of(folder_of(counts_of(rows, 2)), step_ranges=2, min_seq=16)
    assert [grid.cells[0, band].calls_per_run for band in range(2)] == [1.0, 9.0]


def test_a_capture_of_an_unknown_layer_or_shape_is_no_evidence():
    rows = [LayerCalls("a", 0, (4,))]
    known, unknown, other = (
        dataclasses.replace(record_of(shape, heads=(0, 1), batches=(0,)), layer=layer)
        for layer, shape in (("a", SHAPE), ("b", SHAPE), ("a", LONG))
    )
    grid = grid_of(
        folder_of(counts_of(rows, None), known, unknown, other), step_ranges=1, min_seq=16
    )
    assert grid.cells[0, 0].records == (known,)
    with pytest.raises(CaptureError, match="no capture of a call"):
        grid_of(folder_of(counts_of(rows, None), unknown, other), step_ranges=1, min_seq=16)


def test_a_folder_of_an_earlier_release_is_refused(tmp_path):
    recordings.write(tmp_path / "c", counts={"layer_calls": ()})
    with pytest.raises(CaptureError, match=r"no calls by layer and step.*record again"):
        grid_of(open_captures(tmp_path / "c"), step_ranges=2, min_seq=16)


def test_a_folder_of_short_calls_alone_is_refused(tmp_path):
    """As of a language model that wrote tokens and read no prompt."""
    recordings.write(tmp_path / "c")
    with pytest.raises(CaptureError, match=r"at least 65 queries and keys.*--min-seq"):
        grid_of(open_captures(tmp_path / "c"), step_ranges=2, min_seq=65)


@pytest.mark.parametrize("bands", [0, -1, 101])
def test_impossible_numbers_of_bands_are_refused(tmp_path, bands):
    recordings.write(tmp_path / "c")
    with pytest.raises(UsageError, match=f"--step-ranges {bands}"):
        grid_of(open_captures(tmp_path / "c"), step_ranges=bands, min_seq=16)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": dict.fromkeys(LAYERS, 0)},
        {"layers": dict.fromkeys(LAYERS, -5)},
        {"layers": dict.fromkeys(LAYERS, 10**400)},
        {"layer_calls": tuple(LayerCalls(layer, 0, (10**400,)) for layer in LAYERS)},
        {"shapes": (ShapeCount(dataclasses.replace(SHAPE, batch=0), 5),)},
        {"shapes": (ShapeCount(dataclasses.replace(SHAPE, heads_q=-2), 5),)},
        {"shapes": (ShapeCount(SHAPE, 5), ShapeCount(dataclasses.replace(SHAPE, batch=0), 5))},
        {"shapes": (ShapeCount(SHAPE, 5), ShapeCount(dataclasses.replace(SHAPE, seq_q=-9), 5))},
        {"layer_calls": tuple(LayerCalls(layer, 99, (1,)) for layer in LAYERS)},
        {"layer_calls": tuple(LayerCalls(layer, -1, (1,)) for layer in LAYERS)},
        {"layer_calls": tuple(LayerCalls(layer, 0, (0, -3)) for layer in LAYERS)},
        {"layers": {}},
    ],
)
def test_counts_that_nobody_counted_are_refused(tmp_path, changes):
    recordings.write(tmp_path / "c", counts=changes)
    with pytest.raises(CaptureError):
        grid_of(open_captures(tmp_path / "c"), step_ranges=2, min_seq=16)
