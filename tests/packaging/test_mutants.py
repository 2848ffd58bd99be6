"""The list of mutants fits the package, and the program tells the dead from the living."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.script import loaded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    return loaded("mutants")


def test_there_are_thirty_of_distinct_names(mutants: ModuleType) -> None:
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS) == 30


def test_the_text_of_each_stands_once_in_its_file(mutants: ModuleType) -> None:
    assert mutants.misplaced() == []


def test_each_is_python_and_another_text(mutants: ModuleType) -> None:
    for mutant in mutants.MUTANTS:
        text = (ROOT / "sage_plugin" / mutant.file).read_text(encoding="utf-8")
        assert mutant.old != mutant.new
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_each_has_tests_that_are_there(mutants: ModuleType) -> None:
    for mutant in mutants.MUTANTS:
        places = [word for word in mutant.tests if word.startswith("tests/")]
        assert places, mutant
        assert all((ROOT / place.partition("::")[0]).exists() for place in places), mutant


def test_a_text_that_moved_away_or_stands_twice_is_named(
    mutants: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "sage_plugin").mkdir()
    (tmp_path / "sage_plugin" / "a.py").write_text("x = 1\nx = 1\n", encoding="utf-8")
    wrong = [mutants.Mutant("m", name, "x = 1", "x = 2", ()) for name in ("a.py", "gone.py")]
    assert mutants.misplaced(wrong, tmp_path) == [
        "a.py has 'x = 1' 2 times (m)",
        "gone.py has 'x = 1' 0 times (m)",
    ]


@pytest.fixture
def toy(mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of one function, one test of it, and three mutants."""
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["gpu: x"]\n',
        "sage_plugin/__init__.py": "",
        "sage_plugin/sums.py": "twice = lambda x: x * 2\nthrice = lambda x: x * 3\n",
        "tests/test_sums.py": (
            "from sage_plugin.sums import twice\n\n\n"
            "def test_two():\n    assert twice(2) == 4\n\n\n"
            "def test_never():\n    assert twice(2) == 5\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second of imports each time
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants.misplaced, "__defaults__", (mutants.MUTANTS, tmp_path))
    test = "tests/test_sums.py::test_two"
    made = (
        mutants.Mutant("noticed", "sums.py", "x * 2", "x * 4", (test,)),
        mutants.Mutant("unseen", "sums.py", "x * 3", "x * 4", (test,)),
        mutants.Mutant("no test", "sums.py", "x * 2", "x * 4", ("tests/test_sums.py::test_never",)),
        mutants.Mutant("astray", "sums.py", "x * 9", "x * 4", (test,)),
    )
    monkeypatch.setattr(mutants, "MUTANTS", made)
    return mutants


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (1, 0, "  1 died: noticed"),
        (2, 1, "  2 lived: unseen"),
        (3, 2, "  3 its tests fail without it: no test"),
        (4, 2, "sums.py has 'x * 9' 0 times (astray)"),
    ],
)
def test_what_becomes_of_a_mutant(
    toy: ModuleType, capsys: pytest.CaptureFixture[str], number: int, code: int, words: str
) -> None:
    assert toy.main(["--only", str(number)]) == code
    assert words in capsys.readouterr().out


def test_the_list_names_each(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert toy.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "  1 sums.py: noticed"
