"""Reading is strict: what we wrote comes back equal, anything else is one `ConfigError`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.errors import ConfigError
from sage_plugin.registry import load, store
from tests.registry import samples

integers = st.integers(1, 2**40)
floats = st.floats(1e-9, 1e9)


@st.composite
def entries(draw):
    key = samples.key(
        head_dim=draw(st.sampled_from([64, 96, 128])),
        causal=draw(st.booleans()),
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        seq_q=draw(integers),
        seq_k=draw(integers),
        batch_heads=draw(integers),
    )
    config = samples.config(block_m=draw(integers), smooth_k=draw(st.booleans()))
    evidence = samples.evidence(
        draw(st.floats(-1, 1)),
        baseline=draw(st.text()),
        inputs=tuple(draw(st.lists(st.text(), max_size=3))),
        time=samples.timing(draw(floats)),
    )
    return samples.entry(key, config, because=evidence, seq_q_range=(1, key.seq_q))


@settings(max_examples=50)
@given(st.lists(entries(), max_size=6, unique_by=lambda entry: entry.key))
def test_what_was_written_is_read_back(listed):
    file = samples.file(*listed)
    text = store.text_of(file)
    again = load.parse(text, "memory")
    assert set(again.entries) == set(file.entries)
    assert dataclasses.replace(again, entries=()) == dataclasses.replace(file, entries=())
    assert store.text_of(again) == text


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_random_bytes_are_a_config_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "random.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"random\.json"):
        load.read(path)


def sound() -> dict:
    return json.loads(store.text_of(samples.file(samples.entry())))


def changed(*path: object, value: object) -> str:
    data = sound()
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "'schema_version' is missing"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 50_000, "nested too deeply"),
        ('{"schema_version": NaN}', "NaN"),
        ('{"schema_version": 1e999}', "too large"),
        ('{"schema_version": 1, "schema_version": 1}', "twice"),
        ("9" * 10_000, "not valid JSON"),
        (changed("schema_version", value=2), "schema version 2"),
        (changed("surprise", value=1), "surprise"),
        (changed("entries", 0, "config", "block_m", value="128"), "block_m"),
        (changed("entries", 0, "config", "block_m", value=True), "block_m"),
        (changed("entries", 0, "config", "block_m", value=0), "block_m is 0"),
        (changed("entries", 0, "config", "maxnreg", value=-1), "maxnreg is -1"),
        (changed("entries", 0, "config", "BLOCK_M", value=1), "BLOCK_M"),
        (changed("entries", 0, "seq_q_range", value=[2048, 4096]), "seq_q_range"),
        (changed("entries", 0, "seq_k_range", value=[1024]), "seq_k_range"),
        (changed("entries", 0, "key", "seq_q", value=-5), "seq_q is -5"),
        (changed("entries", 0, "key", "mask_kind", value="fancy"), "mask_kind"),
        (changed("entries", 0, "key", "layout", value="bsdh"), "layout"),
        (changed("entries", 0, "evidence", "time", "median_ms", value=0), "its time"),
        (changed("entries", value=sound()["entries"] * 2), "twice"),
    ],
)
def test_hostile_text_is_named(text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load.parse(text, "some.json")
    assert str(caught.value).startswith("some.json: ")


def test_what_is_not_a_small_regular_text_file_is_refused(tmp_path: Path, monkeypatch):
    with pytest.raises(ConfigError, match="no such file"):
        load.read(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        load.read(tmp_path)
    path = tmp_path / "big.json"
    path.write_text(" " * 100)
    monkeypatch.setattr(load, "MAX_FILE_BYTES", 99)
    with pytest.raises(ConfigError, match="larger than 99 bytes"):
        load.read(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="UTF-8"):
        load.read(path)


def test_search_path_order(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", str(tmp_path / "env"))
    monkeypatch.setattr(load, "shipped_dir", lambda: tmp_path / "shipped")
    found = load.search_path("chip", "attention", tmp_path / "mine")
    assert [label for label, _ in found] == ["argument", "env", "user", "shipped"]
    assert found[0][1] == tmp_path / "mine" / "chip" / "attention.json"
    assert all(path.parts[-2:] == ("chip", "attention.json") for _, path in found)
    monkeypatch.delenv("SAGE_PLUGIN_CONFIG_DIR")
    assert [label for label, _ in load.search_path("chip")] == ["user", "shipped"]


def test_shipped_configs_are_package_data_or_those_of_a_checkout(tmp_path: Path, monkeypatch):
    package = tmp_path / "lib" / "sage_plugin"
    (package / "registry").mkdir(parents=True)
    monkeypatch.setattr(load, "__file__", str(package / "registry" / "load.py"))
    (tmp_path / "lib" / "configs").mkdir()
    assert load.shipped_dir() is None, "a folder beside site-packages is not ours"
    (tmp_path / "lib" / "pyproject.toml").touch()
    assert load.shipped_dir() == tmp_path / "lib" / "configs"
    (package / "configs").mkdir()
    assert load.shipped_dir() == package / "configs"


def test_text_is_sorted_and_one_line_per_flat_record():
    long, short = samples.entry(samples.key(seq_q=4096)), samples.entry()
    text = store.text_of(samples.file(long, short))
    assert text == store.text_of(samples.file(short, long))
    assert text.index('"seq_q": 1024') < text.index('"seq_q": 4096')
    changed_text = store.text_of(
        samples.file(dataclasses.replace(short, config=samples.config(block_n=32)), long)
    )
    lines = zip(text.splitlines(), changed_text.splitlines(), strict=True)
    assert sum(a != b for a, b in lines) == 1
