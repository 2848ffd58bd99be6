"""A race drops what surely cannot win, goes on where it is not known, and ends when it must."""

from __future__ import annotations

import random

from sage_plugin.tune.search.elimination import AGAIN, BASE, LOOKS, Elimination


def race(times: dict[str, float], *, min_gain: float | None, noise: float = 0.004, seed: int = 0):
    """Rounds that each took part in, until the rule ends the race."""
    order = random.Random(seed)
    every = {BASE: 1.0, AGAIN: 1.0} | times
    rule = Elimination(tuple(times), min_gain, rounds=40)
    ms = {name: [] for name in every}
    names = list(every)
    while names:
        for name in names:
            ms[name].append(every[name] * order.gauss(1, noise))
        kept = rule(ms)
        assert set(kept) <= set(names)
        names = [name for name in names if name in kept]
    return {name: len(taken) for name, taken in ms.items()}


def test_slow_ones_leave_early_and_the_winner_stays():
    taken = race({"1": 0.9, "2": 1.1, "3": 0.95}, min_gain=0.01)
    assert taken["2"] == taken["3"] == LOOKS[0]
    assert taken["1"] == taken[BASE] == taken[AGAIN]
    assert taken["1"] < 40, "a sure winner is not timed on"


def test_equal_winners_are_told_apart_until_the_last_round_and_no_longer():
    assert race({"1": 0.9, "2": 0.9}, min_gain=0.01) == dict.fromkeys(("0", "again", "1", "2"), 40)


def test_nobody_who_can_win_ends_the_race():
    taken = race({"1": 1.05, "2": 1.04}, min_gain=0.01)
    assert max(taken.values()) == LOOKS[0]


def test_what_forty_rounds_do_not_decide_takes_more():
    taken = [race({"1": 0.97}, min_gain=0.01, noise=0.03, seed=s)["1"] for s in range(10)]
    assert sum(rounds > 40 for rounds in taken) > 5


def test_a_race_ends_whatever_the_noise():
    for seed in range(3):
        assert race({"1": 0.985}, min_gain=0.01, noise=0.2, seed=seed)["1"] <= LOOKS[-1]


def test_without_a_baseline_the_fastest_is_found():
    taken = race({"1": 0.9, "2": 1.05}, min_gain=None)
    assert taken["1"] == 40
    assert taken["2"] < 40


def test_alike_configs_are_dropped_where_a_gain_is_asked():
    taken = race(dict.fromkeys("123", 1.0), min_gain=0.01, noise=0.003)
    assert max(taken[name] for name in "123") <= 18
