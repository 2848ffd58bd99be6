"""docs/families.md lists the families that the tests hold to their calls, and what they do."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.script import loaded

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

AGAIN = {"diffusers": ("flux", "pixart", "lumina2"), "transformers": ("llama", "t5")}
"""Families whose rows are made again: plain ones, one that never compiled, one that falls back."""


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return loaded("family_tables")


def test_the_page_lists_every_family_and_none_that_differs(tables: ModuleType) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert list(tables.outdated(page)) == []
    assert page.count("same bits") > 80
    gone = page.replace("| pixart |", "| pixel |")
    assert "diffusers" in next(tables.outdated(gone))
    assert list(tables.outdated(page.replace("same bits", "DIFFERS", 1)))


@pytest.mark.parametrize(("library", "name"), [(lib, n) for lib, ns in AGAIN.items() for n in ns])
def test_a_row_made_again_is_the_row_of_the_page(
    tables: ModuleType, library: str, name: str
) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.row(name, tables.FAMILIES[library][name]) in page.splitlines()


def test_a_patched_model_that_differs_is_named(tables: ModuleType) -> None:
    model = tables.FAMILIES["diffusers"]["flux"]("flux")
    assert tables.compiled(model, model.run() + 1, lambda: model) == "BREAKS: other results"
