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


def along(times):
    """Times by points that have a length alone."""
    return {(seq,): row for seq, row in times.items()}


def test_a_region_ends_at_a_gap_and_where_nothing_was_timed():
    gap = along({1: {A: 1.0, B: 2.0}, 2: {A: 2.0, B: 1.0}, 3: {A: 1.0, B: 2.0}})
    for n, config in ((1, A), (2, B), (3, A)):
        assert regions.region(gap, (n,), config) == (((n, n),), 0.0)
    unknown = {(1,): {A: 1.0}, (2,): {B: 1.0}}
    assert regions.region(unknown, (1,), A) == (((1, 1),), 0.0)
    box, loss = regions.region(along(TIMES), (4096,), C, 0.02)
    assert (box, loss) == (((2048, 16_384),), pytest.approx(0.0075))
    box, loss = regions.region(along(TIMES), (4096,), A, 0.02)
    assert (box, loss) == (((4096, 4096),), pytest.approx(0.25)), "as it is"


HEADS = {
    (1024, 8): {A: 1.0, B: 1.0},
    (2048, 8): {A: 2.0, B: 2.1},
    (1024, 30): {A: 3.0, B: 3.0},
    (2048, 30): {A: 7.0, B: 6.0},
    (1024, 60): {A: 6.0, B: 5.0},
}


@pytest.mark.parametrize(
    ("at", "config", "box"),
    [
        ((1024, 8), A, ((1024, 1024), (8, 30))),
        ((2048, 8), A, ((1024, 2048), (8, 8))),
        ((2048, 30), B, ((1024, 2048), (30, 30))),
        ((1024, 60), B, ((1024, 1024), (8, 60))),
    ],
)
def test_a_region_is_the_largest_box_that_was_timed_whole(at, config, box):
    assert regions.region(HEADS, at, config) == (box, 0.0)


def test_the_fewest_of_many_boxes_are_taken_widest_first(monkeypatch):
    times = {batch_key(*point): row for point, row in HEADS.items()}
    every = [samples.entry(key, min(row, key=row.get)) for key, row in times.items()]
    priced = regions.priced(every, times)
    assert len(regions.redundant(priced)) == 2
    monkeypatch.setattr(regions, "MOST_COMPARED", 0)
    kept = {*priced} - {*regions.redundant(priced)}
    for seq, heads in HEADS:
        assert any(
            e.seq_q_range[0] <= seq <= e.seq_q_range[1]
            and e.batch_heads_range[0] <= heads <= e.batch_heads_range[1]
            for e in kept
        )


def batch_key(seq, heads):
    return samples.key(seq_q=seq, seq_k=seq, batch_heads=heads)


def test_batches_that_were_timed_bound_what_an_entry_serves(path, tmp_path):
    key = batch_key
    times = {key(*point): row for point, row in HEADS.items()}
    merged(path, samples.entry(key(2048, 30), B), samples.entry(key(2048, 8), A))
    price(path, times, limit=0.01, drop=False)
    found = {
        e.key.batch_heads: (e.seq_q_range, e.batch_heads_range) for e in load.read(path).entries
    }
    assert found == {30: ((1024, 2048), (30, 30)), 8: ((1024, 2048), (8, 8))}
    served = {}
    for heads in (4, 8, 14, 30, 60, 61):
        match = lookup.find(key(1500, heads), facts=FACTS, config_dir=tmp_path)
        served[heads] = match and (match.nearness.name, match.entry.key.batch_heads)
    assert served == {
        4: ("REACHED", 8), 8: ("MEASURED", 8), 14: ("REACHED", 8), 30: ("MEASURED", 30),
        60: ("REACHED", 30), 61: None,
    }  # fmt: skip
    (told, *_) = lookup.explain(key(1500, 61), facts=FACTS, config_dir=tmp_path)
    assert "batch_heads 61 is over 2 times from its measured range 30..30" in told


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


@pytest.mark.parametrize(
    ("config", "torch", "region"),
    [(C, "2.13.1", (2048, 16_384)), (C, "2.14.0", (2048, 4096)), (A, "2.13.1", (2048, 4096))],
    ids=["measured again", "with other software", "another config"],
)
def test_a_region_stays_with_its_config_and_software(path, config, torch, region):
    tools = dataclasses.replace(samples.TOOLCHAIN, torch="2.13.0")
    old = [held(1024, A), held(2048, B), held(4096, C)]
    merged(path, *(with_tools(entry, tools) for entry in old))
    price(path, BY_KEY, limit=0.02, drop=False)
    merged(path, with_tools(held(4096, config), dataclasses.replace(tools, torch=torch)))
    found = {e.key.seq_q: (e.seq_q_range, e.regret) for e in load.read(path).entries}
    kept = region[1] == 16_384
    assert found[4096][0] == region
    assert (found[4096][1] is not None) == kept


def with_tools(entry, tools):
    """An entry as other software measured it."""
    evidence = dataclasses.replace(entry.evidence, toolchain=tools)
    return dataclasses.replace(entry, evidence=evidence)


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0.6, {1024: (1024, 16_384)}),
        (0.02, {1024: (1024, 1024), 4096: (2048, 16_384)}),
        (0.0, {1024: (1024, 1024), 2048: (2048, 2048), 4096: (4096, 16_384)}),
    ],
)
def test_entries_that_others_cover_go_if_asked(path, limit, kept):
    merged(path, *(held(seq, min(row, key=row.get)) for seq, row in TIMES.items()))
    changed = price(path, BY_KEY, limit=limit, drop=True)
    assert {e.key.seq_q: e.seq_q_range for e in load.read(path).entries} == kept
    assert {key.seq_q for key in changed} >= TIMES.keys() - kept.keys()


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
