"""Cards by what files recorded of them: the first place's word stands, damaged files are none."""

from __future__ import annotations

import dataclasses

import pytest

from sage_plugin.errors import UsageError
from sage_plugin.registry import cards, load
from tests.registry import samples


def test_the_first_place_that_knows_a_card_is_believed(put, monkeypatch):
    shipped = put(samples.file(), "shipped")
    monkeypatch.setattr(load, "shipped_dir", lambda: shipped)
    assert cards.recorded(samples.FACTS.slug) == samples.FACTS
    other = dataclasses.replace(samples.FACTS, sm_count=114)
    mine = put(samples.file(facts=other), "mine")
    assert cards.recorded(samples.FACTS.slug, mine) == other


@pytest.mark.parametrize("text", ["{", ""])
def test_what_cannot_be_read_or_lies_elsewhere_is_no_card(put, monkeypatch, text):
    root = put(samples.file(), "mine")
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    path = load.file_path(root, samples.FACTS.slug)
    moved = load.file_path(root, "elsewhere")
    moved.parent.mkdir()
    moved.write_bytes(path.read_bytes())
    path.write_text(text)
    for slug in (samples.FACTS.slug, "elsewhere"):
        with pytest.raises(UsageError, match="with configs are none"):
            cards.recorded(slug, root)


def test_the_beginning_of_one_card_alone_names_it(put, monkeypatch):
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    every = {}
    for slug in ("nvidia-h100-pcie", "nvidia-h100-80gb-hbm3", "nvidia-l40s", "nvidia-l4"):
        every[slug] = dataclasses.replace(samples.FACTS, slug=slug)
        root = put(samples.file(facts=every[slug]), "mine")
    assert cards.recorded("nvidia-l4", root).slug == "nvidia-l4"
    assert cards.recorded("nvidia-h100-80gb", root).slug == "nvidia-h100-80gb-hbm3"
    for several in ("nvidia-h100", "nvidia-l40", "nvidia"):
        with pytest.raises(UsageError, match=f"--as '{several}'"):
            cards.recorded(several, root)
