"""Bands of steps: what they hold, what they cover, what is none."""

from __future__ import annotations

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.plugin.policy.step_range import Band


@pytest.mark.parametrize(
    ("text", "total", "steps"),
    [
        ("", 4, [0, 1, 2, 3]),
        (":", 4, [0, 1, 2, 3]),
        ("1:3", 4, [1, 2]),
        (":2", 4, [0, 1]),
        ("-3:", 5, [2, 3, 4]),
        (":-1", 4, [0, 1, 2]),
        ("-9:-3", 5, [0, 1]),
        ("0%:50%", 7, [0, 1, 2, 3]),
        ("50%:100%", 7, [4, 5, 6]),
        ("20%:-1", 10, [2, 3, 4, 5, 6, 7, 8]),
        ("3:", 2, []),
        (":10%", 4, []),
    ],
)
def test_a_band_holds_its_steps(text, total, steps):
    band = Band.parse(text)
    assert [step for step in range(total) if band.contains(step, total)] == steps


def test_percents_part_a_run_without_a_gap_or_an_overlap():
    for total in range(1, 60):
        parts = [Band.parse(t) for t in (":20%", "20%:55%", "55%:")]
        held = [sum(part.contains(step, total) for part in parts) for step in range(total)]
        assert held == [1] * total


NONE = ("3", "a:b", "1:2:3", "120%:", "-5%:", "1.5:", "3:3", "4:2", "5%:5%", "-2:-4", "9999999999:")


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_band_is_refused_in_one_sentence(text):
    with pytest.raises(ConfigError, match="steps"):
        Band.parse(text)


@pytest.mark.parametrize(
    ("wide", "narrow", "covers"),
    [
        ("", "3:5", True),
        ("3:5", "", False),
        ("2:8", "3:8", True),
        ("2:8", "3:9", False),
        (":50%", "10%:40%", True),
        (":50%", "10:40", False),
        ("-5:", "-3:", True),
        ("-3:", "-5:", False),
        ("2:", "4:7", True),
        (":7", "4:7", True),
        ("0:3", ":3", False),
        ("1:", "-3:", False),
    ],
)
def test_only_what_is_sure_counts_as_covered(wide, narrow, covers):
    assert Band.parse(wide).covers(Band.parse(narrow)) is covers


@pytest.mark.parametrize(
    ("text", "needs"), [("", False), ("1:3", False), ("-1:", True), (":5%", True)]
)
def test_a_band_says_whether_it_needs_the_number_of_steps(text, needs):
    assert Band.parse(text).needs_total is needs
    if not needs:
        assert Band.parse(text).contains(2, None) in (True, False)
