"""Exact, near, or nothing; never another device or another discrete field; no disk after that."""

from __future__ import annotations

import builtins
import dataclasses
import logging
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sage_plugin.registry import load, lookup
from sage_plugin.schema import CallKey
from tests.registry import samples
from tests.registry.samples import FACTS

DISCRETE_CHANGES = [
    {"kernel": "sage"},
    {"variant": "hopper"},
    {"head_dim": 128},
    {"dv": 128},
    {"dtype": "float32"},
    {"gqa_ratio": 4},
    {"causal": True},
    {"mask_kind": "key_bias"},
]
SHARED = [{"dtype": "float16"}, {"layout": "bshd"}]
"""Fields of calls that may share an entry: kernels read strides, and 16 bits of either kind."""


def wide(seq: int, block_m: int, **changes: object):
    key = samples.key(seq_q=seq, seq_k=seq, **changes)
    return samples.entry(
        key, samples.config(block_m=block_m), seq_q_range=(512, 8192), seq_k_range=(512, 8192)
    )


def test_exact_key_wins_over_a_nearer_place_in_the_file(put):
    root = put(samples.file(samples.entry(), wide(1025, 64)))
    match = lookup.find(samples.KEY, facts=FACTS, config_dir=root)
    assert match is not None
    assert (match.source, match.label, match.entry.key) == ("exact", "argument", samples.KEY)


def test_nearest_in_log_space_inside_the_measured_range(put, monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    root = put(samples.file(wide(1000, 32), wide(4000, 64)))

    def block_m(seq: int) -> int | None:
        key = samples.key(seq_q=seq, seq_k=seq)
        match = lookup.find(key, facts=FACTS, config_dir=root)
        return match and match.entry.config.block_m

    assert block_m(1990) == 32, "nearer in log space, farther in plain distance from the middle"
    assert block_m(2010) == 64
    assert (block_m(256), block_m(16_384)) == (32, 64), "twice beyond what was measured"
    assert (block_m(255), block_m(16_385)) == (None, None)


def test_batch_and_heads_are_free_but_count_in_the_distance(put):
    root = put(samples.file(wide(1024, 32, batch_heads=8), wide(1024, 64, batch_heads=512)))
    key = samples.key(seq_q=1100, seq_k=1100, batch_heads=100_000)
    match = lookup.find(key, facts=FACTS, config_dir=root)
    assert match is not None
    assert match.source == "near"
    assert match.entry.config.block_m == 64


@pytest.mark.parametrize("change", DISCRETE_CHANGES, ids=lambda change: next(iter(change)))
def test_a_discrete_field_never_differs(put, change):
    root = put(samples.file(wide(1024, 32)))
    assert lookup.find(samples.key(seq_q=1025), facts=FACTS, config_dir=root)
    assert lookup.find(samples.key(seq_q=1025, **change), facts=FACTS, config_dir=root) is None


@pytest.mark.parametrize("change", SHARED, ids=lambda change: next(iter(change)))
def test_layouts_and_16_bit_dtypes_share_entries_the_own_first(put, change):
    root = put(samples.file(samples.entry()))
    match = lookup.find(samples.key(**change), facts=FACTS, config_dir=root)
    assert (match.source, match.entry.key) == ("near", samples.KEY)
    own = samples.key(seq_q=2000, seq_k=2000, **change)
    root = put(samples.file(wide(1024, 32), wide(2000, 64, **change)), "both")
    match = lookup.find(samples.key(**change), facts=FACTS, config_dir=root)
    assert match.entry.key == own, "though the other is nearer"


def test_an_exact_entry_of_a_later_place_beats_a_far_one_of_an_earlier(put, monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: put(samples.file(samples.entry()), "shipped"))
    mine = put(samples.file(wide(1025, 64)), "mine")
    match = lookup.find(samples.KEY, facts=FACTS, config_dir=mine)
    assert (match.source, match.label) == ("exact", "shipped")
    lookup.clear()
    between = lookup.find(samples.key(seq_q=1100, seq_k=1100), facts=FACTS, config_dir=mine)
    assert (between.source, between.label) == ("near", "argument")


def test_every_field_of_the_key_is_either_discrete_or_a_number():
    tested = {name for change in (*DISCRETE_CHANGES, *SHARED) for name in change}
    fields = {field.name for field in dataclasses.fields(CallKey)}
    assert fields - tested == {"seq_q", "seq_k", "batch_heads"}


@hypothesis_settings(max_examples=60)
@given(
    measured=st.dictionaries(st.integers(16, 4096), st.integers(1, 9), min_size=1, max_size=6),
    asked=st.integers(8, 8192),
    legal_from=st.integers(1, 10),
)
def test_near_match_is_legal_inside_the_range_and_the_nearest(measured, asked, legal_from):
    listed = [
        samples.entry(
            samples.key(seq_q=seq, seq_k=seq),
            samples.config(num_stages=stages),
            seq_q_range=(seq // 2, seq * 2),
            seq_k_range=(seq // 2, seq * 2),
        )
        for seq, stages in measured.items()
    ]
    key = samples.key(seq_q=asked, seq_k=asked)
    ranked = lookup.matches_in(samples.file(*listed), key, None, "argument")
    legal = [m for m in ranked if m.entry.config.num_stages >= legal_from]
    allowed = {
        seq: abs(math.log(seq / asked))
        for seq, stages in measured.items()
        if seq // 2 <= asked * 2 and asked <= seq * 4 and stages >= legal_from
    }
    assert (not legal) == (not allowed)
    if legal:
        best = legal[0].entry.key.seq_q
        inside = [far for seq, far in allowed.items() if seq // 2 <= asked <= seq * 2]
        assert allowed[best] == pytest.approx(min(inside or allowed.values()))
        assert (legal[0].source == "exact") == (best == asked)


def test_an_illegal_config_is_passed_over(put):
    root = put(samples.file(wide(1024, 256), wide(1100, 64)))
    key = samples.key(seq_q=1024, seq_k=1024)

    def find(limit: int):
        return lookup.find(
            key, facts=FACTS, config_dir=root, is_legal=lambda config: config.block_m <= limit
        )

    assert find(256).entry.config.block_m == 256
    assert find(128).entry.config.block_m == 64, "the answer of the memo is checked anew"
    assert find(32) is None


def test_places_are_asked_in_order(put, tmp_path, monkeypatch):
    roots = {
        name: put(samples.file(samples.entry(launch=samples.config(block_m=size))), root)
        for size, (name, root) in enumerate(
            [
                ("argument", "mine"),
                ("env", "env"),
                ("user", "user/sage_plugin"),
                ("shipped", "shipped"),
            ],
            start=1,
        )
    }
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", str(roots["env"]))
    monkeypatch.setattr(load, "shipped_dir", lambda: roots["shipped"])
    order = ["argument", "env", "user", "shipped"]
    for place in order:
        lookup.clear()
        match = lookup.find(samples.KEY, facts=FACTS, config_dir=roots["argument"])
        assert match.label == place
        load.file_path(roots[place], FACTS.slug).unlink()
    lookup.clear()
    assert lookup.find(samples.KEY, facts=FACTS, config_dir=roots["argument"]) is None


def test_a_new_environment_is_seen_without_clearing(put, monkeypatch):
    assert lookup.find(samples.KEY, facts=FACTS) is None
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", str(put(samples.file(samples.entry()))))
    assert lookup.find(samples.KEY, facts=FACTS).label == "env"


def test_no_file_access_after_the_first_look(put, monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    root = put(samples.file(*(wide(seq, 32) for seq in (600, 700, 800, 900, 1000))))
    known = [samples.key(seq_q=s, seq_k=s) for s in (600, 700, 800, 900, 1000)]
    unknown = [samples.key(seq_q=s, seq_k=s) for s in (1, 2, 3, 4, 5)]
    opened: list[str] = []
    stats: list[str] = []
    real_open, real_stat = builtins.open, os.stat

    def counting_open(path, *args, **kwargs):
        opened.append(str(path))
        return real_open(path, *args, **kwargs)

    def counting_stat(path, *args, **kwargs):
        stats.append(str(path))
        return real_stat(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", counting_open)
    monkeypatch.setattr(os, "stat", counting_stat)
    for key in known + unknown:
        lookup.find(key, facts=FACTS, config_dir=root)
    assert len(opened) == len(set(opened)) == 1
    opened.clear()
    stats.clear()
    for _ in range(1000):
        for key in known:
            assert lookup.find(key, facts=FACTS, config_dir=root)
        for key in unknown:
            assert lookup.find(key, facts=FACTS, config_dir=root) is None
    assert (opened, stats) == ([], [])


def test_the_memo_is_bounded(put, monkeypatch):
    monkeypatch.setattr(lookup, "MEMO_LIMIT", 10)
    root = put(samples.file(wide(1024, 32)))
    for seq in range(1, 40):
        lookup.find(samples.key(seq_q=seq), facts=FACTS, config_dir=root)
    assert len(lookup._ranked) <= 10


@pytest.mark.parametrize(
    ("change", "says"),
    [({"slug": "amd-mi300x"}, "amd-mi300x"), ({"arch": "sm_80"}, "sm_80")],
)
def test_another_devices_file_is_never_used(put, caplog, change, says):
    root = put(samples.file(samples.entry()))
    foreign = samples.file(samples.entry(), facts=dataclasses.replace(FACTS, **change))
    path = load.file_path(root, FACTS.slug)
    other = put(foreign, "other") / foreign.device.slug / "attention.json"
    path.write_text(other.read_text())
    with caplog.at_level(logging.WARNING):
        assert lookup.find(samples.KEY, facts=FACTS, config_dir=root) is None
    assert says in caplog.text
    assert len(caplog.records) == 1


def test_another_familys_file_is_never_used(put):
    file = dataclasses.replace(samples.file(samples.entry()), family="grouped_matmul")
    root = put(file)
    path = load.file_path(root, FACTS.slug)
    path.write_text(load.file_path(root, FACTS.slug, "grouped_matmul").read_text())
    assert lookup.find(samples.KEY, facts=FACTS, config_dir=root) is None


def test_a_folder_in_the_place_of_the_file_is_a_miss(tmp_path, caplog):
    load.file_path(tmp_path, FACTS.slug).mkdir(parents=True)
    assert lookup.find(samples.KEY, facts=FACTS, config_dir=tmp_path) is None
    assert len(caplog.records) == 1


def explain(put, key: CallKey, *entries, **keywords) -> str:
    root = put(samples.file(*entries))
    return lookup.explain(key, facts=FACTS, config_dir=root, **keywords)[0]


@pytest.mark.parametrize("change", DISCRETE_CHANGES, ids=lambda change: next(iter(change)))
def test_explain_names_the_first_differing_field(put, change):
    (name, value), *_ = change.items()
    far = wide(1024, 32, causal=True, head_dim=256, gqa_ratio=7)
    sentence = explain(put, samples.key(**change), wide(1024, 32), far)
    assert f"{name} is {getattr(samples.KEY, name)} there, {value} here" in sentence


def test_explain_names_range_legality_and_match(put):
    assert "seq_q 19000 is over 2 times from its measured range 512..8192" in explain(
        put, samples.key(seq_q=19_000), wide(1024, 32)
    )
    reached = explain(put, samples.key(seq_q=9000, layout="bshd"), wide(1024, 32))
    assert "layout bhsd, seq_q 1024, seq_k 1024, batch_heads 16; within 2 times its" in reached
    assert "its lengths, loss not measured" in reached
    assert "exact match" in explain(put, samples.KEY, samples.entry())
    near = explain(put, samples.key(seq_q=2000), wide(1024, 32))
    assert "near match, measured at seq_q 1024, seq_k 1024" in near
    assert "between measured lengths, loss not measured (`sage configs regions`" in near
    assert "none legal" in explain(put, samples.KEY, samples.entry(), is_legal=lambda _: False)
    assert "no entries" in explain(put, samples.KEY)


def test_explain_tells_absent_damaged_and_foreign_places(put, tmp_path):
    root = put(samples.file(samples.entry()))
    path = load.file_path(root, FACTS.slug)

    def first() -> str:
        return lookup.explain(samples.KEY, facts=FACTS, config_dir=root)[0]

    path.write_text(path.read_text().replace(FACTS.slug, "other-chip"))
    assert "passed over, it was tuned on 'other-chip'" in first()
    path.write_text("{")
    assert "passed over, not valid JSON" in first()
    path.unlink()
    assert first().endswith("no such file")


DAMAGED = {
    "a number of 400 digits": lambda text: text.replace("16", f"{10**400}"),
    "a name twice": lambda text: text.replace('"family"', '"family": "x", "family"', 1),
    "NaN": lambda text: '{"schema_version": NaN}',
    "nested": lambda text: "[" * 100_000,
    "no object": lambda text: "[1]",
    "half of it": lambda text: text[: len(text) // 2],
    "no text": lambda text: "\0",
    "nothing": lambda text: "",
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_warning_and_a_miss(put, caplog, damage):
    root = put(samples.file(samples.entry()))
    path = load.file_path(root, FACTS.slug)
    path.write_text(damage(path.read_text()))
    for seq in range(1, 20):
        assert lookup.find(samples.key(seq_q=seq), facts=FACTS, config_dir=root) is None
    (warning,) = [r.message for r in caplog.records if str(root) in r.message]
    assert "its configs are not used (`sage configs check` says more)" in warning
    assert "passed over" in lookup.explain(samples.KEY, facts=FACTS, config_dir=root)[0]


@pytest.mark.parametrize("error", [RuntimeError, KeyError, OSError])
def test_a_user_without_a_home_has_no_folder_of_configs(monkeypatch, error):
    """Such as one of a container whose number is in no list of users."""
    import platformdirs

    def fail(name):
        raise error("no home")

    monkeypatch.setattr(platformdirs, "user_config_path", fail)
    assert load.user_dir() is None
    places = load.search_path(FACTS.slug, config_dir="~nosuchuser/x")
    assert places[0][0] == "argument"
    assert "user" not in [label for label, _ in places]
    assert lookup.find(samples.KEY, facts=FACTS, config_dir="~nosuchuser/x") is None


def test_the_key_is_the_same_in_every_interpreter():
    script = (
        "from tests.registry import samples; import hashlib;"
        "print(hashlib.sha256(repr(samples.KEY.to_json()).encode()).hexdigest())"
    )
    seen = set()
    for seed in range(4):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1
