"""An order is learned from what was measured; it ranks, and knows nothing from too little."""

from __future__ import annotations

import dataclasses
import math

from sage_plugin.tune.run.runner import Resources
from sage_plugin.tune.search.learned_order import FEWEST, learned
from tests.tune import landscapes, scripted
from tests.tune.test_search import bad, ok

SPACE = scripted.space(64)


def test_too_few_trials_teach_nothing():
    few = [ok(config, 1.0) for config in SPACE[: FEWEST - 1]]
    assert learned(few, {}) is None
    assert learned([*few, bad(SPACE[-1])], {}) is None


def test_fields_that_cost_time_come_last():
    trials = [ok(c, 1 + 0.1 * math.log2(c.num_stages)) for c in SPACE[::2]]
    rank = learned(trials, {})
    order = sorted(SPACE[1::2], key=rank)
    assert {c.num_stages for c in order[:6]} == {1}
    assert {c.num_stages for c in order[-6:]} == {4}


def test_what_the_compiler_says_is_learned_from_trials_and_not_assumed():
    def trial(at: int, slow: float):
        spills = 512 * (at % 2)
        return dataclasses.replace(ok(SPACE[at], slow if spills else 1.0), spills=spills)

    spilling, tidy = SPACE[40], SPACE[41]
    compiled = {spilling: Resources(spill_bytes=512), tidy: Resources(spill_bytes=0)}
    for slow, first in ((1.2, tidy), (0.9, spilling)):
        rank = learned([trial(at, slow) for at in range(32)], compiled)
        assert min(spilling, tidy, key=rank) == first


def test_studies_teach_each_other_whatever_their_level():
    configs = landscapes.space_of("sage:portable sm_89")
    one = [t for t in landscapes.trials_of(configs, 3, study="one") if t.status == "ok"]
    other = [
        dataclasses.replace(t, study="two", extra={"ratio": t.extra["ratio"] * 3}) for t in one
    ]
    rank = learned([*one[:60], *other[60:90]], {})
    rest = one[90:]
    guessed = sorted(rest, key=lambda trial: rank(trial.config))
    half = len(rest) // 2
    mean = [
        sum(t.extra["ratio"] for t in part) / half for part in (guessed[:half], guessed[-half:])
    ]
    assert mean[0] < mean[1]
