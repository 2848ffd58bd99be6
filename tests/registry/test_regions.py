"""Winners are priced at other lengths; an entry serves what it was seen to serve well."""

from __future__ import annotations

import dataclasses

import pytest

from sage_plugin.registry import load, lookup, regions
from sage_plugin.registry.merge import price
from tests.registry import samples
from tests.registry.samples import FACTS, merged

A, B, C = (samples.config(block_m=m) for m in (32, 64, 128))
TIMES = {
    1024: {A: 1.0, B: 1.005, C: 1.5},
    2048: {A: 2.1, B: 2.0, C: 2.015},
    4096: {A: 5.0, B: 4.04, C: 4.0},
    16_384: {A: 90.0, B: 66.0, C: 60.0},
}
BY_KEY = {samples.key(seq_q=seq, seq_k=seq): row for seq, row in TIMES.items()}


def test_a_region_ends_at_a_gap_and_where_nothing_was_timed():
    gap = {1: {A: 1.0, B: 2.0}, 2: {A: 2.0, B: 1.0}, 3: {A: 1.0, B: 2.0}}
    assert regions.region(gap, 1, A) == (1, 1, 0.0)
    unknown = {1: {A: 1.0}, 2: {B: 1.0}}
    assert regions.region(unknown, 1, A) == (1, 1, 0.0)
    assert regions.region(TIMES, 4096, C, 0.02) == pytest.approx((2048, 16_384, 0.0075))
    assert regions.region(TIMES, 4096, A, 0.02) == pytest.approx((4096, 4096, 0.25)), "as it is"


def held(seq: int, config, **changes):
    return samples.entry(samples.key(seq_q=seq, seq_k=seq), config, **changes)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    return load.file_path(tmp_path, FACTS.slug)


def test_regions_are_written_found_and_explained(path, tmp_path):
    merged(path, held(1024, A), held(2048, B), held(4096, C))
    changed = price(path, BY_KEY, limit=0.02, drop=False)
    assert {key.seq_q for key in changed} == {1024, 2048, 4096}
    found = {e.key.seq_q: (e.seq_q_range, e.regret) for e in load.read(path).entries}
    assert found == {
        1024: ((1024, 1024), 0.0),
        2048: ((1024, 4096), 0.01),
        4096: ((2048, 16_384), 0.0075),
    }
    between = samples.key(seq_q=12_000, seq_k=12_000)
    match = lookup.find(between, facts=FACTS, config_dir=tmp_path)
    assert (match.nearness.name, match.entry.key.seq_q) == ("MEASURED", 4096)
    (told, *_) = lookup.explain(between, facts=FACTS, config_dir=tmp_path)
    assert "inside its region, where at most 0.8% is lost" in told
    assert price(path, BY_KEY, limit=0.02, drop=False) == (), "it is written already"
    merged(path, held(32_768, A))
    kept = {e.key.seq_q: e.seq_q_range for e in load.read(path).entries}
    assert kept[4096] == (2048, 16_384), "a new neighbor does not widen what was measured"


def test_entries_that_others_cover_go_if_asked(path):
    merged(path, held(1024, A), held(2048, B), held(4096, C))
    changed = price(path, BY_KEY, limit=0.02, drop=True)
    left = load.read(path).entries
    assert [entry.key.seq_q for entry in left] == [1024, 4096]
    assert samples.key(seq_q=2048, seq_k=2048) in changed


def test_what_was_not_timed_beside_other_lengths_stays_as_it_was():
    other = samples.entry(samples.key(seq_q=1024, seq_k=77), A)
    alone = held(1024, A)
    masked = samples.entry(samples.key(causal=True), A)
    assert regions.priced([other, masked], BY_KEY) == (other, masked)
    assert regions.priced([alone], {alone.key: TIMES[1024]}) == (alone,)
    assert regions.redundant([alone, other]) == ()


@pytest.mark.parametrize("regret", [-0.1, 1e7])
def test_an_impossible_regret_is_a_problem(regret):
    (problem,) = load.entry_problems(dataclasses.replace(samples.entry(), regret=regret))
    assert "its regret is" in problem
