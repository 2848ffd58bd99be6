"""Entries of linears in the registry: written, read back, and found by features and rows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.registry import load, lookup, regions
from sage_plugin.registry.distance import Nearness
from sage_plugin.registry.validate import problems
from sage_plugin.schema import LinearKey
from tests.registry import samples
from tests.registry.samples import FACTS, LINEAR_CONFIG, LINEAR_KEY, linear_entry, merged


def key(**changes: object) -> LinearKey:
    return dataclasses.replace(LINEAR_KEY, **changes)


def test_what_is_merged_is_read_back_with_the_rows_between_measured_ones(tmp_path) -> None:
    rows = (256, 1024, 1536)
    path = load.file_path(tmp_path, FACTS.slug, "linear")
    merged(path, *(linear_entry(key(rows=n)) for n in rows))
    entries = load.read(path).entries
    assert [entry.key.rows for entry in entries] == list(rows)
    assert [entry.rows_range for entry in entries] == [(256, 512), (512, 1536), (768, 1536)]
    assert {entry.config for entry in entries} == {LINEAR_CONFIG}
    assert problems(path) == []


FOUND = (
    ({}, Nearness.EXACT),
    ({"rows": 600}, Nearness.MEASURED),
    ({"rows": 4096}, Nearness.REACHED),
    ({"dtype": "float16"}, Nearness.MEASURED),
    ({"rows": 4097}, None),
    ({"rows": 255}, None),
    ({"dtype": "float32"}, None),
    ({"in_features": 1024}, None),
    ({"out_features": 512}, None),
    ({"kernel": "fp8_row"}, None),
)


@pytest.mark.parametrize(("change", "nearness"), FOUND)
def test_features_are_exact_and_rows_within_reach(put, change, nearness) -> None:
    root = put(samples.file(linear_entry(rows_range=(512, 2048))))
    match = lookup.find(key(**change), facts=FACTS, config_dir=root)
    assert (match and match.nearness) == nearness
    assert match is None or match.entry.config == LINEAR_CONFIG


def test_why_an_entry_serves_or_does_not(put) -> None:
    root = put(samples.file(linear_entry()))

    def why(**changes: object) -> str:
        return lookup.explain(key(**changes), facts=FACTS, config_dir=root)[0]

    assert "linear.json: exact match" in why()
    assert "near match, measured at rows 1024;" in why(rows=1100)
    assert "out_features is 1024 there, 512 here" in why(out_features=512)
    assert "rows 9000 is over 2 times from its measured range 1024..1024" in why(rows=9000)


def test_a_file_of_one_family_holds_no_entry_of_another(put, caplog) -> None:
    root = put(samples.file(linear_entry()))
    path = load.file_path(root, FACTS.slug, "linear")
    data = json.loads(path.read_text()) | {"family": "attention"}
    with pytest.raises(ConfigError, match="entry 1: is of linear, the file of attention"):
        load.parse(json.dumps(data), "here")
    load.file_path(root, FACTS.slug).write_text(path.read_text())
    assert lookup.find(samples.KEY, facts=FACTS, config_dir=root) is None
    assert "holds 'linear' configs" in caplog.text


WRONG = (
    ({"rows_range": (2000, 3000)}, "rows_range is [2000, 3000], expected [low, high] around 1024"),
    ({"config": LINEAR_CONFIG.replaced(block_k=0)}, "block_k is 0, expected at least 1"),
    ({"key": key(out_features=0)}, "out_features is 0"),
)


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_what_contradicts_itself_is_named(change, says) -> None:
    assert says in " ".join(load.entry_problems(dataclasses.replace(linear_entry(), **change)))


def test_a_name_that_no_linear_has_is_unreachable(put) -> None:
    root = put(samples.file(linear_entry(key(kernel="sage")), linear_entry(key(variant="hopper"))))
    found = " ".join(problems(load.file_path(root, FACTS.slug, "linear")))
    assert "unknown kernel 'sage'; known: bf16" in found
    assert "1024x512->1024 bfloat16" in found
    assert "unknown variant 'hopper'; known: torch, triton" in found


def test_rows_are_priced_as_lengths_are() -> None:
    other = LINEAR_CONFIG.replaced(block_m=128)
    times = {
        key(rows=1024): {LINEAR_CONFIG: 1.0, other: 1.2},
        key(rows=2048): {LINEAR_CONFIG: 2.01, other: 2.0},
        key(rows=4096): {LINEAR_CONFIG: 5.0, other: 4.0},
    }
    (entry,) = regions.priced([linear_entry()], times)
    assert (entry.rows_range, entry.regret) == ((1024, 2048), 0.005)
