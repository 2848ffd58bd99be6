"""The search visits what it should, stops when told to, and the finalists are the right ones."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.schema import Trial
from sage_plugin.tune.search import search
from sage_plugin.tune.search.search import ErrorLimit, Search, SearchLimits
from tests.registry import samples
from tests.tune import scripted

SPACE = scripted.space(32)
EVERY = SearchLimits(exhaustive=True)


def ok(config, ratio: float, error: float = 0.01) -> Trial:
    errors = dataclasses.replace(samples.ERRORS, centred_rel_l1=error)
    return Trial("s", config, "screen", "ok", errors=errors, extra={"ratio": ratio})


def bad(config, **extra: float) -> Trial:
    return Trial("s", config, "screen", "compile_error", reason="no room", extra=extra)


def walk(search: Search, speed=lambda config: 1.0, fails=()) -> dict:
    """Everything that a search proposes until it ends, tried."""
    trials = {}
    while batch := search.propose(trials):
        assert not set(batch) & set(trials)
        trials |= {c: bad(c) if c in fails else ok(c, speed(c)) for c in batch}
    return trials


@given(st.integers(0, 2**32), st.none() | st.sampled_from(SPACE))
def test_an_exhaustive_search_visits_each_config_once(seed, incumbent):
    tried = list(walk(Search(SPACE, incumbent, EVERY, seed=seed)))
    assert sorted(tried, key=repr) == sorted(SPACE, key=repr)
    assert tried[0] == SPACE[0]
    assert incumbent is None or incumbent in tried[:2]
    assert tried == list(walk(Search(SPACE, incumbent, EVERY, seed=seed)))


def test_a_small_space_is_visited_whole():
    assert set(walk(Search(SPACE[:17]))) == set(SPACE[:17])


def test_an_incumbent_from_outside_the_space_is_tried_too():
    outside = samples.config(num_stages=7)
    assert Search(SPACE, outside).propose({}) == [SPACE[0], outside]


def test_seeds_give_different_orders():
    first = {SPACE[0]: ok(SPACE[0], 1.0)}
    one, two = (Search(SPACE, seed=seed).propose(first) for seed in (0, 1))
    assert one != two


LARGE = tuple(
    samples.config(block_m=m, block_n=n, num_warps=w, num_stages=s, maxnreg=r, smooth_v=v)
    for m in (128, 64, 32, 16) for n in (64, 128, 32) for w in (4, 8) for s in (2, 3, 4)
    for r in (0, 128, 168) for v in (True, False)
)  # fmt: skip


def test_a_spread_has_every_value_of_every_axis_and_the_recipe_of_the_default():
    for seed in range(5):
        chosen = search.spread(LARGE, search.SPREAD, seed)
        assert len(set(chosen)) == search.SPREAD
        for name in ("block_m", "block_n", "num_warps", "num_stages", "maxnreg"):
            assert {getattr(c, name) for c in chosen} == {getattr(c, name) for c in LARGE}, name
        assert {c.smooth_v for c in chosen} == {LARGE[0].smooth_v}


def test_the_best_of_a_large_smooth_space_is_found_by_its_neighbors():
    best = LARGE[-31]

    def speed(config) -> float:
        fields = ("block_m", "block_n", "num_warps", "num_stages", "maxnreg", "smooth_v")
        return 1 + 0.01 * sum(getattr(config, f) != getattr(best, f) for f in fields)

    for seed in range(5):
        tried = walk(Search(LARGE, seed=seed), speed)
        assert best in tried
        assert len(tried) < 0.4 * len(LARGE)


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        ({}, False),
        ({"block_m": 128}, True),
        ({"num_stages": 4}, True),
        ({"block_m": 128, "block_n": 128, "num_stages": 3}, True),
        ({"block_m": 32, "num_stages": 4}, False),
        ({"block_m": 128, "num_warps": 8}, False),
        ({"block_m": 128, "smooth_v": True}, False),
    ],
)
def test_what_is_larger_than_a_config_that_did_not_fit_is_skipped(changes, skipped):
    failed = samples.config(block_m=64, block_n=64, num_warps=4, num_stages=2, smooth_v=False)
    other = dataclasses.replace(failed, **changes)
    default = samples.config(num_warps=1)
    space = (default, failed, other)
    trials = {default: ok(default, 1.0), failed: bad(failed, too_large=1.0)}
    tried = Search(space)
    assert tried.skipped(trials) == ([other] if skipped else [])
    expected = [] if skipped or other == failed else [other]
    assert tried.propose(trials) == expected
    trials[failed] = bad(failed)
    assert tried.skipped(trials) == [], "a failure of another kind says nothing of larger ones"


def test_a_learned_order_orders_a_batch():
    first = {SPACE[0]: ok(SPACE[0], 1.0)}
    batch = Search(SPACE).propose(first, rank=lambda config: -config.num_warps)
    warps = [config.num_warps for config in batch]
    assert warps == sorted(warps, reverse=True)


def test_patience_counts_valid_trials_only():
    space, wait = SPACE[:12], SearchLimits(patience=2)
    assert len(walk(Search(space, limits=wait))) == 3, "the default, and two that are no better"
    failed = set(space[1:8])
    tried = walk(Search(space, limits=wait), fails=failed)
    assert sum(trial.status == "ok" for trial in tried.values()) == 3
    better = {config: 1 - 0.1 * i for i, config in enumerate(space)}
    patient = Search(space, limits=wait)
    assert len(walk(patient, lambda c: 2 - better[c])) == 3
    assert len(walk(Search(space, limits=SearchLimits(max_trials=5)))) == 5


def test_an_error_limit_is_relative_to_the_default_or_absolute():
    default, near, far = (
        ok(SPACE[0], 1.0, 0.02),
        ok(SPACE[1], 0.9, 0.0219),
        ok(SPACE[2], 0.8, 0.023),
    )
    trials = {t.config: t for t in (default, near, far)}
    for limit, allowed in (
        (ErrorLimit(), [near, default]),
        (ErrorLimit(max_ratio=1.2), [far, near, default]),
        (ErrorLimit(max_error=0.0201), [default]),
        (ErrorLimit(max_error=0.01), []),
        (ErrorLimit(max_ratio=2.0, max_error=0.022), [near, default]),
    ):
        tried = Search(SPACE[:3], error_limit=limit)
        assert tried.allowed(trials) == allowed, limit
        expected = [SPACE[0], *(t.config for t in allowed if t is not default)] if allowed else []
        assert list(tried.finalists(trials)) == expected
    lost = trials | {SPACE[0]: bad(SPACE[0])}
    assert Search(SPACE[:3]).allowed(lost) == [far, near], "without a default there is no ratio"


def test_a_default_beyond_the_largest_error_is_no_finalist():
    trials = {c: ok(c, r, e) for c, r, e in zip(SPACE, (1.0, 1.2), (0.03, 0.01), strict=False)}
    tried = Search(SPACE[:2], error_limit=ErrorLimit(max_error=0.02))
    assert tried.finalists(trials) == (SPACE[1],)


def test_finalists_are_the_best_few_within_the_band_with_the_default_first():
    ratios = dict(zip(SPACE, [1.0, *(0.5 + 0.001 * i for i in range(12))], strict=False))
    ratios |= dict.fromkeys(SPACE[13:], 2.0)
    screens = {c: ok(c, r) for c, r in ratios.items()}
    assert Search(SPACE).finalists(screens) == SPACE[: 1 + search.FINALISTS]
    assert Search(SPACE, SPACE[30]).finalists(screens)[-1] == SPACE[30]
    lone = screens | {c: ok(c, 0.9) for c in SPACE[2:13]}
    assert Search(SPACE).finalists(lone) == SPACE[:2], "the others are out of its band"


def test_few_candidates_are_all_raced():
    screens = {c: ok(c, 1.0 + i) for i, c in enumerate(SPACE[:3])}
    assert Search(SPACE).finalists(screens) == SPACE[:3]


def test_failed_configs_are_never_finalists():
    screens = {SPACE[0]: bad(SPACE[0]), SPACE[1]: ok(SPACE[1], 1.0), SPACE[2]: bad(SPACE[2])}
    assert Search(SPACE, SPACE[2]).finalists(screens) == (SPACE[1],)
    assert Search(SPACE).finalists({SPACE[0]: bad(SPACE[0])}) == ()


def test_a_winner_on_the_edge_of_an_axis_is_told():
    stages = [samples.config(num_stages=n) for n in (2, 3, 4)]
    assert search.edges(stages[2], stages) == ("num_stages 4 is the largest that was searched",)
    assert search.edges(stages[0], stages) == ("num_stages 2 is the smallest that was searched",)
    assert search.edges(stages[1], stages) == ()
    assert search.edges(stages[1], stages[:2]) == (), "of two values each is an edge"
