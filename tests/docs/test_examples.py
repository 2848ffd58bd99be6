"""Every example of a docstring runs, and gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import sage_plugin

ROOT = Path(sage_plugin.__file__).parent
PROMPT = ">>> "


def modules() -> list[str]:
    """Modules with an example, by name."""
    with_one = (file for file in sorted(ROOT.rglob("*.py")) if PROMPT in file.read_text("utf-8"))
    parts = (file.relative_to(ROOT.parent).with_suffix("").parts for file in with_one)
    return [".".join(part for part in names if part != "__init__") for names in parts]


def failures(module: object, name: str) -> list[str]:
    """What the examples of a module get wrong."""
    told: list[str] = []
    runner = doctest.DocTestRunner(
        verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=told.append)
    return told


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch, unconfigured) -> None:
    monkeypatch.chdir(tmp_path)
    assert "".join(failures(importlib.import_module(name), name)) == ""


def test_a_wrong_example_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'def wrong():\n    """\n    >>> 1 + 1\n    3\n    """\n'
    (tmp_path / "made_up_for_examples.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("made_up_for_examples")
    assert "Expected:\n    3\nGot:\n    2" in "".join(failures(module, module.__name__))
