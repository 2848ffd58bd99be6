"""How a comparison looks on a terminal: one table per input, a summary over several, statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from sage_plugin.bench.difference import OutputDifference, Spread
from sage_plugin.bench.rows import EMULATION_NOTE, KernelRow, Table
from sage_plugin.bench.suite import describe
from sage_plugin.kernels.contract import HOST

METRICS = ("time", "throughput", "bandwidth", "arithmetic_intensity")
STAMP_STYLES = {"clean": "green", "noisy": "yellow", "throttled": "bold red"}

Column = tuple[str, Callable[[KernelRow], str | Text]]


def render(table: Table, metrics: Sequence[str], *, width: int) -> RenderableType:
    """One input: a row per kernel, speed on the left and error on the right.

    In a narrow terminal the errors stand below the speeds.
    """
    speeds, errors = _speeds(table, metrics), _errors(table)
    whole = _filled(table, speeds + errors)
    wide = Console(width=1000)
    grids: list[RenderableType] = [whole]
    if wide.measure(whole).maximum > width:
        grids = [_filled(table, speeds), Text(""), _filled(table, errors)]
    return Group(_title(table), *grids, *_captions(table))


def _filled(table: Table, columns: Sequence[Column]) -> RichTable:
    grid = _grid()
    grid.add_column("kernel", no_wrap=True)
    for name, _ in columns:
        grid.add_column(name, justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(_label(row, table), *(cell(row) for _, cell in columns))
    return grid


def _grid() -> RichTable:
    """The narrowest of Rich's tables that still rules off its head."""
    return RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)


def _title(table: Table) -> Text:
    title = Text(table.input, style="bold")
    shape = describe(table.shape)
    if shape != table.input:
        title.append(f"  {shape}", style="not bold")
    title.append("  ").append(table.stamp, style=STAMP_STYLES[table.stamp])
    if table.aa_ratio is not None:
        title.append(f" (A/A {table.aa_ratio:.3f})", style="not bold")
    return title


def _speeds(table: Table, metrics: Sequence[str]) -> list[Column]:
    of: dict[str, list[Column]] = {
        "time": [
            ("time ms", lambda r: digits(r.time.median_ms)),
            ("±", _spread_text),
            ("alone", lambda r: digits(r.kernel_time.median_ms) if r.kernel_time else "-"),
        ],
        "throughput": [("TFLOPS", lambda r: digits(r.tflops, 3))],
        "bandwidth": [("GB/s", lambda r: digits(r.gb_per_s, 3))],
        "arithmetic_intensity": [("FLOP/B", lambda r: digits(r.flop_per_byte))],
    }
    columns = [column for metric in metrics for column in of[metric]]
    if table.rows[0].reference:
        columns.append(("faster", _speedup))
    if any(row.note for row in table.rows):
        columns.append(("speed", lambda r: "no" if r.note else "yes"))
    return columns


def _errors(table: Table) -> list[Column]:
    columns: list[Column] = [
        ("rel L1", lambda r: _error(r.errors.rel_l1)),
        ("centred", lambda r: _error(r.errors.centred_rel_l1)),
        ("cosine", lambda r: f"{r.errors.worst_head_cosine:.5f}"),
        ("gate", lambda r: Text("fail", style="bold red") if r.gate else Text("ok", style="green")),
    ]
    if table.rows[0].reference:
        columns.insert(0, ("L1 ref", _reference_error))
    return columns


def _variants(table: Table) -> list[str]:
    """Variants of the kernels that have some."""
    return sorted({row.variant for row in table.rows if row.variant != HOST})


def _label(row: KernelRow, table: Table) -> str:
    """The kernel's name, with its variant where the caption cannot say it for all."""
    return row.label if row.variant != HOST and len(_variants(table)) > 1 else row.kernel


def _speedup(row: KernelRow) -> str:
    return "1" if row.speedup is None else f"{row.speedup:.2f}x"


def _reference_error(row: KernelRow) -> str:
    return _error(None if row.reference_errors is None else row.reference_errors.rel_l1)


def _spread_text(row: KernelRow) -> str:
    half = 50 * (row.time.high_ms - row.time.low_ms) / row.time.median_ms
    return f"{half:.1f}%" if half < 9.95 else f"{half:.0f}%"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 10 else f"{value:.1e}"


def digits(value: float, count: int = 4) -> str:
    """A number to some significant digits, at most four of them behind the point.

    Example:
        >>> digits(8.12345), digits(0.0312, 3), digits(0.00912), digits(0.00071), digits(0.0)
        ('8.123', '0.0312', '0.0091', '7e-04', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = count - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.0e}" if abs(value) < 0.001 else f"{value:.{min(4, max(0, places))}f}"


def _captions(table: Table) -> list[Text]:
    first = table.rows[0]
    words = [f"method {first.time.method}, {first.time.n} samples, {first.source}"]
    if len(_variants(table)) == 1:
        words.append(f"variant {_variants(table)[0]}")
    sources = sorted({row.config_source for row in table.rows if row.config_source})
    if sources:
        words.append("configs " + "/".join(sources))
    if first.reference:
        words.append(f"faster and L1 ref: against {first.reference}")
    floor = first.errors.rounding_floor
    words.append(f"rounding to {first.shape.dtype} alone: centred {floor:.4f}")
    lines = [Text("; ".join(words), style="dim")]
    if any(row.note for row in table.rows):
        lines.append(Text(f"{EMULATION_NOTE}; only the errors say something", style="yellow"))
    lines += [
        Text(f"gate: {row.label}: {reason}", style="red")
        for row in table.rows
        for reason in row.gate
    ]
    lines += [Text(f"left out: {reason}", style="yellow") for reason in table.failed]
    return [*lines, Text("")]


def render_summary(tables: Sequence[Table]) -> RenderableType:
    """Over several inputs: how often each kernel passed, its worst error, its mean speed-up."""
    grid = _grid()
    reference = next((row.reference for t in tables for row in t.rows if row.reference), "")
    names = ["kernel", "inputs", "gate ok", "worst rel L1", "worst cosine"]
    for name in [*names, f"faster than {reference}"] if reference else names:
        grid.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
    rows = [row for table in tables for row in table.rows]
    for label in dict.fromkeys(row.label for row in rows):
        own = [row for row in rows if row.label == label]
        cells = [
            label,
            str(len(own)),
            str(sum(not row.gate for row in own)),
            _error(max(row.errors.worst_head_rel_l1 for row in own)),
            f"{min(row.errors.worst_head_cosine for row in own):.5f}",
        ]
        ratios = [math.log(row.speedup) for row in own if row.speedup is not None]
        if reference:
            cells.append(f"{math.exp(sum(ratios) / len(ratios)):.2f}x" if ratios else "1")
        grid.add_row(*cells)
    return Group(Text(f"All {len(tables)} inputs", style="bold"), grid)


def render_difference(row: KernelRow, found: OutputDifference) -> RenderableType:
    """Plain statistics of one output against the reference."""
    grid = _grid()
    for name in ("values", "min", "max", "mean", "std", "NaN/Inf"):
        grid.add_column(name, justify="left" if name == "values" else "right")
    for name, spread in (
        (row.reference or "exact", found.reference),
        (row.label, found.test),
        ("absolute error", found.abs_error),
    ):
        grid.add_row(name, *_spread_cells(spread))
    sizes = "x".join(map(str, found.shape))
    lines = (
        f"cosine {found.cosine:.6f}; rows: mean {found.row_cosine_mean:.6f}, "
        f"median {found.row_cosine_median:.6f}, 10th percentile {found.row_cosine_p10:.6f}, "
        f"{found.rows_above:.2%} above 0.99",
        f"{found.upstream_fails:.3%} of values off by more than 0.3 and 25 %",
        "",
    )
    title = Text(f"{row.input}: {row.label} against {row.reference or 'exact'}, rows {sizes}")
    return Group(title, grid, *(Text(line) for line in lines))


def _spread_cells(spread: Spread) -> list[str]:
    values = (spread.min, spread.max, spread.mean, spread.std)
    return [*(f"{value:.4g}" for value in values), str(spread.bad_values)]
