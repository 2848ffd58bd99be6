"""What the fast run leaves out is there to be left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow import INTERPRETED, SLOW, SWEPT, is_slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("beginning", [*SLOW, *SWEPT])
def test_each_beginning_is_that_of_a_test(beginning: str) -> None:
    place, _, name = beginning.partition("::")
    files = [path for path in ROOT.glob("tests/**/test_*.py") if _id(path).startswith(place)]
    assert files
    name = name.partition("[")[0]
    assert any(f"\ndef {name or 'test_'}" in path.read_text(encoding="utf-8") for path in files)


def test_they_are_in_no_part_of_one_another() -> None:
    assert [a for a in SLOW for b in SLOW if a != b and a.startswith(b)] == []


def test_marked_are_they_alone(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marked = item.get_closest_marker("slow") is not None
        assert marked == is_slow(item.nodeid), item.nodeid
    assert is_slow(f"tests/matrix/test_matrix.py::test_x[a row{INTERPRETED}")
    assert not is_slow("tests/matrix/test_matrix.py::test_x[a row-emulation]")


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
