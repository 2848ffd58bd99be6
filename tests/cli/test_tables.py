"""Tables that fit the terminal: one, one per group, several of a group, or lines of text."""

from __future__ import annotations

import io

import pytest

from sage_plugin.cli.console import Console
from sage_plugin.cli.tables import fitted

ROWS = ("first", "second")
GROUPS = [
    [("alpha", lambda row: row * 2), ("beta", lambda row: row * 2)],
    [("gamma", lambda row: "1"), ("result", lambda row: "a\nb")],
]


def shown(width, label):
    console = Console(file=io.StringIO(), width=width)
    for part in fitted(ROWS, ("call", label), GROUPS, width):
        console.print(part)
    return console.file.getvalue()


@pytest.mark.parametrize(("width", "tables"), [(60, 1), (35, 2), (24, 3)])
def test_nothing_is_cut_at_any_width(width, tables):
    lines = shown(width, str).splitlines()
    assert max(map(len, lines)) <= width
    heads = " ".join(line for line in lines if line.startswith("call"))
    assert [heads.count(name) for name in ("call", "alpha", "beta", "gamma", "result")] == [
        tables, 1, 1, 1, 1,
    ]  # fmt: skip
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(("width", "tables"), [(60, 1), (35, 2), (24, 0)])
def test_labels_of_several_lines_are_said_once_where_a_group_does_not_fit(width, tables):
    lines = shown(width, lambda row: f"{row}\nof two").splitlines()
    assert sum(line.startswith("call") for line in lines) == tables
    if not tables:
        assert lines[:5] == [
            "first, of two", "  alpha: firstfirst", "  beta: firstfirst", "  gamma: 1",
            "  result: a, b",
        ]  # fmt: skip
