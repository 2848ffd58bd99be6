"""The environment: read at every call, empty means unset, and nowhere else is it read."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sage_plugin import settings

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("KERNEL", "VARIANT", "CONFIG_DIR", "LAUNCH", "LINEAR_LAUNCH", "PAGED_LAUNCH", "DISABLE")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)


def test_without_any_variable_nothing_is_asked_for():
    assert settings.current() == settings.Settings(*[None] * 6, False)


def test_each_variable_has_its_field(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_KERNEL", "sage")
    monkeypatch.setenv("SAGE_PLUGIN_VARIANT", "emulation")
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", "/some/where")
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"num_warps": 8}')
    monkeypatch.setenv("SAGE_PLUGIN_LINEAR_LAUNCH", '{"num_stages": 2}')
    monkeypatch.setenv("SAGE_PLUGIN_PAGED_LAUNCH", '{"splits": 2}')
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", "1")
    assert settings.current() == settings.Settings(
        "sage", "emulation", Path("/some/where"), '{"num_warps": 8}', '{"num_stages": 2}',
        '{"splits": 2}', True,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", "  ", "\t"])
def test_an_empty_value_counts_as_unset(monkeypatch, name, value):
    monkeypatch.setenv(f"SAGE_PLUGIN_{name}", value)
    assert settings.current() == settings.Settings(*[None] * 6, False)


def test_blanks_around_a_value_are_dropped(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_KERNEL", " sage ")
    assert settings.current().kernel == "sage"


def test_a_change_is_seen_at_the_next_call(monkeypatch):
    for kernel in ("sage", "fav2"):
        monkeypatch.setenv("SAGE_PLUGIN_KERNEL", kernel)
        assert settings.current().kernel == kernel


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", True),
        ("true", True),
        ("yes", True),
        ("anything", True),
        ("0", False),
        ("false", False),
        ("FALSE", False),
        ("no", False),
        ("Off", False),
    ],
)
def test_the_words_that_mean_no(monkeypatch, value, expected):
    monkeypatch.setenv("SAGE_PLUGIN_DISABLE", value)
    assert settings.current().disabled is expected


def test_the_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", "~/configs")
    assert settings.current().config_dir == tmp_path / "configs"


def test_a_home_folder_of_nobody_is_no_exception(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", "~nobody-of-that-name/configs")
    assert settings.current().config_dir == Path("~nobody-of-that-name/configs")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), ("0", False), ("1", True), ("true", True), ("ON", True)],
)
def test_whether_triton_interprets(monkeypatch, value, expected):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert settings.triton_interpreted() is expected


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.current().kernel = "sage"


def test_every_variable_is_documented_and_none_other():
    written = set(re.findall(r"SAGE_PLUGIN_[A-Z_]+", (ROOT / "ENVs.md").read_text()))
    read = set(re.findall(r"SAGE_PLUGIN_[A-Z_]+", (ROOT / "sage_plugin/settings.py").read_text()))
    assert written == read == {f"SAGE_PLUGIN_{name}" for name in NAMES}
