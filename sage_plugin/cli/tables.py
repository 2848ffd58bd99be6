"""Tables on a terminal: columns by name and cell, narrow enough or one below the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

STAMP_STYLES = {"clean": "green", "noisy": "yellow", "throttled": "bold red"}
WORDS = (
    *("call", "config", "result", "tuned on", "kernel", "run", "values", "runs as", "layer"),
    *("layers", "steps", "latents' error by step"),
)
"""Columns of words, which stand to the left; numbers stand to the right."""

Row = TypeVar("Row")
Column = tuple[str, Callable[[Row], str | Text]]


def grid(*columns: str, padding: int = 0) -> Table:
    """Return an empty table, the narrowest that still rules off its head."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, padding, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True)
    return table


def fitted(
    rows: Sequence[Row],
    label: Column[Row],
    groups: Sequence[Sequence[Column[Row]]],
    width: int,
    *,
    padding: int = 0,
) -> list[RenderableType]:
    """Return one table if all columns fit the width, else one per group, or several of a group.

    Each has the label's column in front. Where labels take several lines, and not even a group
    fits, each row becomes lines of text instead.
    """

    def table(columns: Sequence[Column[Row]]) -> Table:
        return _filled(rows, [label, *columns], padding)

    def fits(columns: Sequence[Column[Row]]) -> bool:
        return Console(width=1000).measure(table(columns)).maximum <= width

    every = [column for group in groups for column in group]
    parts = [every] if fits(every) else [p for group in groups for p in _parts(group, fits)]
    if len(parts) > len(groups) and any("\n" in str(label[1](row)) for row in rows):
        return [line for row in rows for line in _record(row, label, every)]
    found: list[RenderableType] = []
    for part in parts:
        found += [*([Text("")] if found else []), table(part)]
    return found


def _parts(
    columns: Sequence[Column[Row]], fits: Callable[[Sequence[Column[Row]]], bool]
) -> Iterator[Sequence[Column[Row]]]:
    """Cut columns into runs that fit, a single one at least."""
    while columns:
        count = next((n for n in range(len(columns), 1, -1) if fits(columns[:n])), 1)
        yield columns[:count]
        columns = columns[count:]


def _record(row: Row, label: Column[Row], columns: Sequence[Column[Row]]) -> Iterator[Text]:
    """A row as its label and a line per column."""

    def words(column: Column[Row]) -> str:
        return ", ".join(str(column[1](row)).split("\n"))

    yield Text(words(label), style="bold")
    yield from (Text(f"  {column[0]}: {words(column)}") for column in columns)


def _filled(rows: Sequence[Row], columns: Sequence[Column[Row]], padding: int) -> Table:
    table = grid(*(name for name, _ in columns), padding=padding)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def markdown(rows: Sequence[Row], columns: Sequence[Column[Row]]) -> str:
    """Write a table in Markdown, numbers to the right."""
    names = [name for name, _ in columns]
    rules = [":--" if name in WORDS else "--:" for name in names]
    cells = [[str(cell(row)).replace("|", r"\|") for _, cell in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, rules, *cells))


def digits(value: float, count: int = 4) -> str:
    """Write a number to some significant digits, at most four of them behind the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = count - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.0e}" if abs(value) < 0.001 else f"{value:.{min(4, max(0, places))}f}"


def optional(value: float | None, form: str) -> str:
    """Write a number in a format, or `-` if there is none."""
    return "-" if value is None else format(value, form)
