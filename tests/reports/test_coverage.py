"""docs/failure_reports.md against the tests: every number once, and no claim without a test."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.matrix.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
MATRIX = "tests/matrix/rows.py"
"""Its rows have numbers too, which are in the ids of tests/matrix/test_matrix.py."""
PAGE = ROOT / "docs/failure_reports.md"
SECTIONS = {
    "A": (1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 13),
    "B": (15, 16, 17, 18, 19, 21, 22, 23, 25, 26, 27, 28, 30, 31),
    "C": (32, 33, 34, 35, 36, 37, 39, 40, 41, 42, 43),
    "D": (46, 48, 49, 50, 51, 52, 54, 55),
    "E": (56, 57, 59, 60, 61, 62, 64, 65, 67, 68, 69, 70),
    "F": (71, 72, 73, 74, 75, 76, 77, 79, 80, 134),
    "G": (81, 82, 84, 85, 86, 88),
    "H": (89, 90, 91, 92, 94, 95, 130),
    "I": (96, 97, 98, 100, 101, 102, 103, 127, 128, 129, 131, 132, 133, 135, 136),
    "J": (104, 106, 107, 108, 109, 110, 111),
    "K": (112, 114, 116, 118, 124),
    "P": tuple(range(400, 409)),
}
"""The numbers of the collected reports; those that are missing repeat others."""

TESTED, VERDICTS = ("handled", "refused"), ("handled", "refused", "left out")
NUMBERS = re.compile(r"test_report_(\d+(?:_(?:and_)?\d+)*)_")
ROW = re.compile(r"\| (\d+) \| \[(.+)\]\((https://[^) ]+)\) \| ([a-z ]+) \| (.+) \|")
FILE = re.compile(r"tests/[\w/]+\.py")


class Row(NamedTuple):
    """One row of the page."""

    section: str
    number: int
    report: str
    link: str
    verdict: str
    where: str

    @property
    def files(self) -> set[str]:
        return set(FILE.findall(self.where))


def rows(text: str) -> list[Row]:
    """The rows of a page; a line of a table that is not one is an error."""
    found, section = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:4]
        if not line.startswith("|") or line.startswith(("| row |", "|---")):
            continue
        row = ROW.fullmatch(line)
        assert row, line
        number, report, link, verdict, where = row.groups()
        found.append(Row(section, int(number), report, link, verdict, where))
    return found


def numbers_of(name: str) -> set[int]:
    """The report numbers in a test's name."""
    found = NUMBERS.match(name)
    return {int(n) for n in re.findall(r"\d+", found[1])} if found else set()


@functools.cache
def files_with_tests() -> dict[int, set[str]]:
    """For each report number, the files with a test of it."""
    found = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for number in numbers_of(node.name):
                    found[number].add(path.relative_to(ROOT).as_posix())
    for row in ROWS:
        for number in row.reports:
            found[number].add(MATRIX)
    return found


def faults(page: list[Row], tested: dict[int, set[str]]) -> list[str]:
    """What is wrong with a page."""
    found = []
    times = Counter(row.number for row in page)
    wanted = {n: section for section, numbers in SECTIONS.items() for n in numbers}
    found += [f"{n} is there {count} times" for n, count in times.items() if count > 1]
    found += [f"{n} is missing" for n in wanted if n not in times]
    for row in page:
        n, files = row.number, row.files
        if wanted.get(n) != row.section:
            found.append(f"{n} is not of section {row.section}")
        if row.verdict not in VERDICTS:
            found.append(f"{n}: verdict {row.verdict!r}")
        elif row.verdict in TESTED:
            found += [f"{n}: {file} has no test of it" for file in files - tested.get(n, set())]
            if not files:
                found.append(f"{n}: no test is named")
        elif tested.get(n):
            found.append(f"{n} is left out, and tested in {', '.join(sorted(tested[n]))}")
    return found


def test_report_72_every_report_is_tested_or_has_a_reason():
    page = rows(PAGE.read_text(encoding="utf-8"))
    assert faults(page, files_with_tests()) == []
    assert all(len(row.where) > 15 and len(row.report) > 10 for row in page)


def test_report_72_every_link_is_of_one_report():
    links = Counter(row.link for row in rows(PAGE.read_text(encoding="utf-8")))
    sources = {"https://github.com/thu-ml/SageAttention"}  # rows that cite source
    assert {link for link, count in links.items() if count > 1} <= sources


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("test_report_17_causal_is_right", {17}),
        ("test_report_89_and_90_mixed", {89, 90}),
        ("test_report_46_49_extreme", {46, 49}),
        ("test_report_7_more_than_2_to_31", {7}),
        ("test_report_is_empty", set()),
        ("test_a_report_5_x", set()),
    ],
)
def test_the_numbers_in_a_name(name, numbers):
    assert numbers_of(name) == numbers


def test_faults_are_found():
    page = rows(PAGE.read_text(encoding="utf-8"))
    tested = files_with_tests()
    assert "1 is missing" in faults(page[1:], tested)
    assert "1 is there 2 times" in faults([page[0], *page], tested)
    wrong = [page[0]._replace(verdict="fine"), page[1]._replace(section="B"), *page[2:]]
    assert faults(wrong, tested) == ["1: verdict 'fine'", "2 is not of section B"]
    named = page[0]._replace(where="tests/reports/test_h_dtypes.py")
    assert faults([named, *page[1:]], tested) == [f"1: {named.where} has no test of it"]
    without = {n: files for n, files in tested.items() if n != 4}
    assert faults(page, without) == ["4: tests/reports/test_a_layout.py has no test of it"]
    left = page[0]._replace(verdict="left out")
    assert any("left out, and tested" in fault for fault in faults([left, *page[1:]], tested))
    with pytest.raises(AssertionError):
        rows("| 1 | no link | handled | x |")
