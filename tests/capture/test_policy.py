"""At most N captures at any time, as many as there are calls, spread over layers and steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.capture.selection.spread import (
    ALREADY_KEPT,
    ENOUGH_OF_SHAPE,
    MORE_SHAPES,
    NOT_SELECTED_LAYER,
    NOT_SELECTED_STEP,
    CaptureCell,
    CaptureVerdict,
    SpreadPolicy,
)
from sage_plugin.capture.selection.steps import StepSelection
from sage_plugin.errors import UsageError


def offer(policy: SpreadPolicy, cell: CaptureCell) -> CaptureVerdict:
    """Judge a call and save it if that is the verdict."""
    verdict = policy.judge(cell)
    if verdict.keep:
        policy.commit(cell, verdict)
    return verdict


def layer_names(count: int, kinds: int = 1) -> list[str]:
    return [f"transformer.blocks.{i // kinds}.attn{i % kinds + 1}" for i in range(count)]


def run(
    limit: int,
    layers: list[str],
    steps: int,
    *,
    announced: int | None = None,
    selection: str | None = None,
) -> tuple[SpreadPolicy, int]:
    """Offer every call in the order of a run; the policy, and how many were saved on the way."""
    policy = SpreadPolicy(limit, steps=StepSelection.parse(selection), total_steps=announced)
    policy.add_layers(layers)
    saved: set[CaptureCell] = set()
    writes = 0
    for step in range(steps):
        for layer in layers:
            verdict = offer(policy, CaptureCell(layer, step))
            assert verdict.keep or verdict.evict is None
            assert bool(verdict.reason) is not verdict.keep
            if verdict.evict is not None:
                saved.remove(verdict.evict)
            if verdict.keep:
                saved.add(CaptureCell(layer, step))
                writes += 1
            assert len(saved) <= limit
    assert saved == set(policy.kept)
    return policy, writes


runs = st.tuples(st.integers(1, 24), st.integers(1, 40), st.integers(1, 60))


@given(runs, st.booleans())
def test_as_many_as_there_are_calls_and_never_more_than_asked(case, known):
    limit, layers, steps = case
    policy, _ = run(limit, layer_names(layers), steps, announced=steps if known else None)
    assert len(policy.kept) == min(limit, layers * steps)


@given(runs)
def test_a_known_run_is_cut_into_equal_parts_and_little_is_written_twice(case):
    """Only the first call of the shape stands in for a planned one until that comes."""
    limit, layers, steps = case
    names = layer_names(layers)
    policy, writes = run(limit, names, steps, announced=steps)
    count = len(policy.kept)
    assert count <= writes <= count + 1
    by_step = Counter(cell.step for cell in policy.kept)
    assert all(count // steps <= by_step[s] <= -(-count // steps) for s in range(steps))
    used = sorted(by_step)
    if count <= steps:
        gaps = [b - a for a, b in zip([-1, *used], [*used, steps], strict=True)]
        assert max(gaps) <= -(-steps // count) + 1
    if count <= min(layers, steps):
        positions = sorted(names.index(cell.layer) for cell in policy.kept)
        assert len(set(positions)) == count
        gaps = [b - a for a, b in zip([-1, *positions], [*positions, layers], strict=True)]
        assert max(gaps) <= -(-layers // count) + 1


@given(runs)
def test_an_unknown_run_leaves_gaps_of_at_most_twice_the_stride(case):
    limit, layers, steps = case
    policy, _ = run(limit, layer_names(layers), steps)
    used = sorted({cell.step for cell in policy.kept})
    if limit >= steps:
        assert used == list(range(steps))
        return
    gaps = [b - a for a, b in zip([-1, *used], [*used, steps], strict=True)]
    assert max(gaps) <= 4 * steps / limit + 1


@pytest.mark.parametrize("announced", [None, 50])
def test_layers_are_covered_evenly(announced):
    names = layer_names(30)
    policy, writes = run(10, names, 50, announced=announced)
    thirds = Counter(names.index(cell.layer) // 10 for cell in policy.kept)
    assert min(thirds[i] for i in range(3)) >= 3
    assert len({cell.layer for cell in policy.kept}) == 10
    assert writes <= 80  # of 1,500 calls, without knowing where the run ends


@pytest.mark.parametrize("announced", [None, 50])
def test_alternating_kinds_of_layer_both_get_their_share(announced):
    policy, _ = run(10, layer_names(60, kinds=2), 50, announced=announced)
    kinds = Counter(cell.layer.rsplit(".", 1)[1] for cell in policy.kept)
    assert min(kinds["attn1"], kinds["attn2"]) >= 4


@pytest.mark.parametrize("announced", [None, 15])
def test_few_layers_share_the_captures(announced):
    policy, _ = run(10, layer_names(4), 15, announced=announced)
    layers = Counter(cell.layer for cell in policy.kept)
    assert len(layers) == 4
    assert max(layers.values()) <= 3


def test_early_steps_do_not_mean_early_layers():
    names = layer_names(30)
    policy, _ = run(10, names, 50, announced=50)
    early = [names.index(cell.layer) for cell in policy.kept if cell.step < 25]
    assert min(early) < 10
    assert max(early) >= 20


def test_a_single_capture_is_from_the_middle():
    policy, _ = run(1, layer_names(30), 50, announced=50)
    assert policy.kept == (CaptureCell(layer_names(30)[15], 25),)


@pytest.mark.parametrize(("announced", "ran"), [(50, 100), (50, 20), (10, 50), (1, 7)])
def test_a_wrong_announcement_breaks_no_limit(announced, ran):
    policy, _ = run(8, layer_names(12), ran, announced=announced)
    assert 3 <= len(policy.kept) <= 8
    if ran > announced:
        assert max(cell.step for cell in policy.kept) >= ran / 2


def test_skipped_calls_are_made_up_for():
    """A cache may leave out the blocks of a step: later calls take over from planned ones."""
    names = layer_names(4)
    policy = SpreadPolicy(8, total_steps=16)
    policy.add_layers(names)
    for step in range(0, 16, 2):
        for name in names:
            offer(policy, CaptureCell(name, step))
    assert len(policy.kept) >= 7
    assert max(Counter(cell.layer for cell in policy.kept).values()) <= 3


def test_a_layer_that_never_runs_leaves_its_share_to_others():
    names = layer_names(4)
    policy = SpreadPolicy(8, total_steps=40)
    policy.add_layers(names)
    for step in range(40):
        for name in names[:2]:
            offer(policy, CaptureCell(name, step))
    assert len(policy.kept) >= 7


def test_only_selected_steps_and_known_layers_are_kept():
    policy, _ = run(6, layer_names(4), 20, selection="0,5,10-14")
    assert {cell.step for cell in policy.kept} <= {0, 5, 10, 11, 12, 13, 14}
    assert len(policy.kept) == 6
    assert offer(policy, CaptureCell("vae.attn", 0)).reason == NOT_SELECTED_LAYER
    assert offer(policy, CaptureCell(layer_names(1)[0], 1)).reason == NOT_SELECTED_STEP
    assert offer(policy, policy.kept[0]).reason == ALREADY_KEPT


def test_layers_may_become_known_during_a_run():
    policy = SpreadPolicy(4)
    policy.add_layers(["transformer.a.0"])
    for step in range(4):
        offer(policy, CaptureCell("transformer.a.0", step))
    policy.add_layers(["transformer.a.0", "transformer_2.a.0"])
    for step in range(4):
        offer(policy, CaptureCell("transformer_2.a.0", step))
    assert len(policy.kept) == 4
    assert {cell.layer for cell in policy.kept} == {"transformer.a.0", "transformer_2.a.0"}


def test_a_call_that_was_not_saved_after_all_is_no_loss():
    policy = SpreadPolicy(1, total_steps=1)
    policy.add_layers(["a"])
    assert policy.judge(CaptureCell("a", 0)).keep
    assert policy.kept == ()
    assert offer(policy, CaptureCell("a", 0, 1)).keep, "the shape has none yet"
    assert offer(policy, CaptureCell("a", 0)).keep


def test_further_calls_of_a_layer_come_last():
    policy = SpreadPolicy(3)
    policy.add_layers(["a"])
    for step in range(3):
        for index in range(2):
            offer(policy, CaptureCell("a", step, index))
    assert {cell.call_index for cell in policy.kept} == {0}


@pytest.mark.parametrize(("limit", "total"), [(0, None), (-1, None), (1, 0)])
def test_impossible_numbers_are_refused(limit, total):
    with pytest.raises(UsageError):
        SpreadPolicy(limit, total_steps=total)


CALLS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11), st.integers(0, 5)), max_size=60)
"""Calls as layer, step and shape, in any order."""


@given(CALLS, st.integers(1, 8), st.none() | st.integers(1, 14), st.none() | st.integers(1, 3))
def test_no_shape_has_two_while_another_has_none(calls, limit, announced, per_shape):
    layers = layer_names(4)
    policy = SpreadPolicy(limit, total_steps=announced, per_shape=per_shape)
    policy.add_layers(layers)
    shapes: dict[CaptureCell, int] = {}
    seen = set()
    for number, (layer, step, shape) in enumerate(sorted(calls, key=lambda call: call[1])):
        cell = CaptureCell(layers[layer], step, number)
        verdict = policy.judge(cell, shape)
        seen.add(shape)
        if verdict.keep:
            policy.commit(cell, verdict, shape)
            shapes[cell] = shape
        kept = Counter(shapes[cell] for cell in policy.kept)
        assert kept.total() <= limit
        assert max(kept.values()) <= (per_shape or limit)
        assert kept.keys() == seen or (kept.total() == limit and set(kept.values()) == {1})
        if not verdict.keep and verdict.reason == MORE_SHAPES:
            assert len(seen) > limit


def test_a_full_shape_goes_on_spreading_among_its_own():
    policy = SpreadPolicy(8, per_shape=2)
    policy.add_layers(["a.0"])
    verdicts = []
    for step in range(8):
        verdicts.append(policy.judge(CaptureCell("a.0", step), "one"))
        if verdicts[-1].keep:
            policy.commit(CaptureCell("a.0", step), verdicts[-1], "one")
    assert ENOUGH_OF_SHAPE in {verdict.reason for verdict in verdicts}
    assert [cell.step for cell in policy.kept][-1] > 2
    with pytest.raises(UsageError, match="per_shape: got 0"):
        SpreadPolicy(8, per_shape=0)
