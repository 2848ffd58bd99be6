"""Heads and batch items are left out so that a capture fits its share of the byte budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin.capture.call import CanonicalCall, canonical
from sage_plugin.capture.selection.extract import extract
from sage_plugin.capture.selection.heads import (
    Part,
    PartRule,
    checked_batch,
    checked_heads,
    part_bytes,
)
from sage_plugin.capture.selection.options import CaptureOptions, parse_bytes
from sage_plugin.errors import UsageError
from tests.capture.toys import event


def call(batch: int = 2, heads: int = 6, group: int = 1, seq: int = 16, **changes) -> CanonicalCall:
    q = torch.zeros(batch, heads * group, seq, 8, dtype=torch.float16)
    k = torch.zeros(batch, heads, seq, 8, dtype=torch.float16)
    made = canonical(event(q, k, k, **changes))
    assert isinstance(made, CanonicalCall)
    return made


def cogvideox() -> CanonicalCall:
    """A call of CogVideoX-2B, 410 MB, without its memory."""
    q = torch.zeros(30, dtype=torch.float16).view(1, 30, 1, 1).expand(2, 30, 17776, 64)
    made = canonical(event(q))
    assert isinstance(made, CanonicalCall)
    return made


@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 4), st.integers(1, 40_000), st.data())
def test_the_part_fits_and_is_what_gets_written(batch, heads, group, cap, data):
    mask = data.draw(
        st.sampled_from([None, (batch, 1, 1, 16), (1, 1, 16, 16), (1, heads * group, 1, 16)])
    )
    made = call(batch, heads, group, mask=None if mask is None else torch.zeros(mask))
    part = PartRule(cap).choose(made)
    if isinstance(part, str):
        assert part_bytes(made, Part((0,), (0,))) > cap
        return
    written = sum(t.nbytes for t in extract(made, part).values())
    assert written == part_bytes(made, part) <= cap
    if len(part.heads) < heads:
        more = Part(part.batch, (*part.heads, 99))
        assert part_bytes(made, more) > cap or mask is not None


def test_everything_is_saved_where_it_fits():
    assert PartRule(10**9).choose(call()) == Part((0, 1), (0, 1, 2, 3, 4, 5))


def test_a_large_call_keeps_heads_from_all_over():
    part = PartRule(100 * 2**20).choose(cogvideox())
    assert isinstance(part, Part)
    assert part.batch == (0, 1)
    assert 6 <= len(part.heads) <= 8
    assert part.heads[0] < 5
    assert part.heads[-1] >= 25


def test_the_default_budget_takes_ten_whole_calls_of_cogvideox():
    part = CaptureOptions().rule().choose(cogvideox())
    assert isinstance(part, Part)
    assert len(part.heads) == 30


def test_batch_items_go_where_not_even_one_head_fits():
    one_head = part_bytes(call(), Part((0,), (0,)))
    assert PartRule(one_head).choose(call()) == Part((0,), (3,))
    assert isinstance(PartRule(one_head - 1).choose(call()), str)


def test_what_was_asked_for_is_saved_or_refused():
    made = call()
    assert PartRule(10**9, heads=2).choose(made) == Part((0, 1), (1, 4))
    assert PartRule(10**9, heads=99).choose(made) == Part((0, 1), tuple(range(6)))
    assert PartRule(10**9, heads=(0, 5, 70)).choose(made) == Part((0, 1), (0, 5))
    assert PartRule(10**9, batch=(1, 7)).choose(made) == Part((1,), tuple(range(6)))
    assert "do not exist" in str(PartRule(10**9, heads=(9,)).choose(made))
    assert "do not exist" in str(PartRule(10**9, batch=(9,)).choose(made))
    both = part_bytes(made, Part((0,), (0, 5)))
    assert PartRule(both, heads=(0, 5)).choose(made) == Part((0,), (0, 5))
    assert "budget" in str(PartRule(both - 1, heads=(0, 5)).choose(made))


@pytest.mark.parametrize(
    ("text", "heads"), [(None, None), ("4", 4), ("0,5,8-10", (0, 5, 8, 9, 10)), ("3,", (3,))]
)
def test_heads_from_text(text, heads):
    assert checked_heads(text) == heads


@pytest.mark.parametrize("text", ["", "0", "x", "1,,2", "5-3", "-1", "1.5"])
def test_nonsense_heads_are_refused(text):
    with pytest.raises(UsageError, match="heads"):
        checked_heads(text)


@pytest.mark.parametrize(
    "text", ["0-3000000000", "9" * 5000, f"0,{'9' * 5000}", "1000000,", "7-1000000"]
)
def test_absurd_indices_are_refused_at_once(text):
    for checked in (checked_heads, checked_batch):
        with pytest.raises(UsageError, match="indices go up to 999999"):
            checked(text)


def test_values_from_python_are_checked():
    assert checked_heads([3, 1, 1]) == (1, 3)
    assert checked_batch("2, 0") == (0, 2)
    assert checked_batch(n for n in (1, 0)) == (0, 1)
    for bad in (0, -1, [], [-2]):
        with pytest.raises(UsageError):
            checked_heads(bad)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 2**32), ("500MB", 500_000_000), ("1.5k", 1500), ("12", 12), ("2 KiB", 2048)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1PB", "1e9", "4 4", "9" * 400])
def test_nonsense_sizes_are_refused(text):
    with pytest.raises(UsageError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_captures": 0},
        {"max_bytes": 1000},
        {"layers": ""},
        {"layers": []},
        {"steps": "x"},
        {"heads": 0},
        {"batch": [-1]},
        {"batch": 1},
        {"batch": "x"},
        {"total_steps": 0},
    ],
)
def test_options_are_checked_at_once(wrong):
    with pytest.raises(UsageError):
        CaptureOptions(**wrong)


def test_options_may_come_from_generators():
    options = CaptureOptions(layers=(n for n in ("a*,b", "c")), steps=iter([1, 2]), batch={1, 0})
    assert options.globs() == ("a*", "b", "c")
    assert options.rule().batch == (0, 1)
