"""The order visits everything, stops when told to, and the finalists are the right ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.schema import Trial
from sage_plugin.tune.configs import search
from tests.registry import samples
from tests.tune import scripted

SPACE = scripted.space(32)


def ok(config, ratio: float) -> Trial:
    return Trial("s", config, "screen", "ok", extra={"ratio": ratio})


def bad(config) -> Trial:
    return Trial("s", config, "screen", "crashed")


@given(st.integers(0, 2**32), st.none() | st.sampled_from(SPACE))
def test_with_no_limit_each_config_is_visited_once(seed, incumbent):
    queue = search.order(SPACE, incumbent, seed)
    assert sorted(queue, key=repr) == sorted(SPACE, key=repr)
    assert queue[0] == SPACE[0]
    assert incumbent is None or incumbent in queue[:2]
    assert queue == search.order(SPACE, incumbent, seed)


def test_an_incumbent_from_outside_the_space_is_tried_too():
    outside = samples.config(num_stages=7)
    assert search.order(SPACE, outside, 0)[:2] == [SPACE[0], outside]


def test_seeds_give_different_orders():
    assert search.order(SPACE, None, 0) != search.order(SPACE, None, 1)


def test_patience_counts_valid_trials_only():
    limits = search.SearchLimits(patience=2)
    first = [ok(SPACE[0], 1.0)]
    assert not search.exhausted([*first, *map(bad, SPACE[1:20])], limits)
    assert not search.exhausted([*first, ok(SPACE[1], 1.1)], limits)
    assert search.exhausted([*first, ok(SPACE[1], 1.1), ok(SPACE[2], 0.999)], limits)
    assert not search.exhausted([*first, ok(SPACE[1], 1.1), ok(SPACE[2], 0.9)], limits)


def test_no_limit_never_ends_a_search():
    assert not search.exhausted([ok(c, 1.0) for c in SPACE], search.SearchLimits())


def test_finalists_are_the_best_few_within_the_band_with_the_default_first():
    ratios = dict(zip(SPACE, [1.0, *(0.5 + 0.001 * i for i in range(12))], strict=False))
    ratios |= dict.fromkeys(SPACE[13:], 2.0)
    screens = {c: ok(c, r) for c, r in ratios.items()}
    assert search.finalists(screens, SPACE[0], None) == SPACE[: 1 + search.FINALISTS]
    assert search.finalists(screens, SPACE[0], SPACE[30])[-1] == SPACE[30]
    lone = screens | {c: ok(c, 0.9) for c in SPACE[2:13]}
    assert search.finalists(lone, SPACE[0], None) == SPACE[:2], "the others are out of its band"


def test_few_candidates_are_all_raced():
    screens = {c: ok(c, 1.0 + i) for i, c in enumerate(SPACE[:3])}
    assert search.finalists(screens, SPACE[0], None) == SPACE[:3]


def test_failed_configs_are_never_finalists():
    screens = {SPACE[0]: bad(SPACE[0]), SPACE[1]: ok(SPACE[1], 1.0), SPACE[2]: bad(SPACE[2])}
    assert search.finalists(screens, SPACE[0], SPACE[2]) == (SPACE[1],)
    assert search.finalists({SPACE[0]: bad(SPACE[0])}, SPACE[0], None) == ()


def test_a_winner_on_the_edge_of_an_axis_is_told():
    stages = [samples.config(num_stages=n) for n in (2, 3, 4)]
    assert search.edges(stages[2], stages) == ("num_stages 4 is the largest that was searched",)
    assert search.edges(stages[0], stages) == ("num_stages 2 is the smallest that was searched",)
    assert search.edges(stages[1], stages) == ()
    assert search.edges(stages[1], stages[:2]) == (), "of two values each is an edge"
