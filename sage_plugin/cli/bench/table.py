"""How a comparison looks: one table per input, a summary over several, what is said below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean

from rich.console import Group, RenderableType
from rich.text import Text

from sage_plugin.bench.difference import OutputDifference
from sage_plugin.bench.rows import EMULATION_NOTE, KernelRow, Table
from sage_plugin.cli.bench.verdict import verdict
from sage_plugin.cli.tables import STAMP_STYLES, Column, digits, fitted, markdown
from sage_plugin.families import describe
from sage_plugin.kernels.contract import HOST
from sage_plugin.schema import DeviceFacts, Toolchain


def render(tables: Sequence[Table], metrics: Sequence[str], *, width: int) -> RenderableType:
    """Render all inputs, a row per kernel, and below them once what holds for all of them."""
    parts: list[RenderableType] = []
    for table in tables:
        groups = [_speeds(table, metrics), _errors(table)]
        parts += [_title(table), *fitted(table.rows, _label(table), groups, width)]
        own = [word for word in _words(table) if word not in _shared(tables)]
        parts += [Text("; ".join(own), style="dim")] if own else []
        parts += [*_warnings(table), Text("")]
        for row in table.rows:
            if row.difference is not None:
                parts += _difference(row, row.difference, width)
    if len(tables) > 1:
        parts += [*_summary(tables, width), Text("")]
    return Group(*parts, *(Text(line, style="dim") for line in _notes(tables)))


def as_markdown(
    tables: Sequence[Table], metrics: Sequence[str], device: DeviceFacts, toolchain: Toolchain
) -> str:
    """Write the same as Markdown, for a pull request or an issue."""
    parts = []
    for table in tables:
        columns = [_label(table), *_speeds(table, metrics), *_errors(table)]
        parts += [f"**{_title(table).plain}**", markdown(table.rows, columns)]
        parts += [f"- {line.plain}" for line in _warnings(table)]
    versions = ", ".join(f"{name} {value}" for name, value in toolchain.to_json().items() if value)
    parts += [verdict(tables), *_notes(tables), f"{device.name} ({device.slug}); {versions}"]
    return "\n\n".join(parts) + "\n"


def _title(table: Table) -> Text:
    title = Text(table.input, style="bold")
    shape = describe(table.shape)
    if shape != table.input:
        title.append(f"  {shape}", style="not bold")
    title.append("  ").append(table.stamp, style=STAMP_STYLES[table.stamp])
    if table.aa_ratio is not None:
        title.append(f" (A/A {table.aa_ratio:.3f})", style="not bold")
    return title


def _speeds(table: Table, metrics: Sequence[str]) -> list[Column[KernelRow]]:
    of: dict[str, list[Column[KernelRow]]] = {
        "time": [
            ("time ms", _speed(lambda r: digits(r.time.median_ms))),
            ("±", _speed(_spread_text)),
            (
                "alone",
                _speed(lambda r: digits(r.kernel_time.median_ms) if r.kernel_time else "-"),
            ),
        ],
        "throughput": [("TFLOPS", _speed(lambda r: digits(r.tflops, 3)))],
        "bandwidth": [("GB/s", _speed(lambda r: digits(r.gb_per_s, 3)))],
        "arithmetic_intensity": [("FLOP/B", lambda r: digits(r.flop_per_byte))],
    }
    columns = [column for metric in metrics for column in of[metric]]
    if reference := table.rows[0].reference:
        emulated = any(row.note for row in table.rows if row.label == reference)
        columns.append(("speed-up", _speed(lambda r: "-" if emulated else _speedup(r))))
    return columns


def _speedup(row: KernelRow) -> str:
    return "1" if row.speedup is None else f"{row.speedup:.2f}x"


def _speed(cell: Callable[[KernelRow], str]) -> Callable[[KernelRow], str]:
    """A cell that says nothing where a kernel is emulated, whose times are no speed."""
    return lambda row: "-" if row.note else cell(row)


def _errors(table: Table) -> list[Column[KernelRow]]:
    columns: list[Column[KernelRow]] = [
        ("rel L1", lambda r: _error(r.errors.rel_l1)),
        ("centred", lambda r: _error(r.errors.centred_rel_l1)),
        ("cosine", lambda r: f"{r.errors.worst_head_cosine:.5f}"),
        ("gate", lambda r: Text("fail", style="bold red") if r.gate else Text("ok", style="green")),
    ]
    if table.rows[0].reference:
        columns.insert(0, ("L1 ref", lambda r: _error(getattr(r.reference_errors, "rel_l1", None))))
    return columns


def _variants(table: Table) -> list[str]:
    """Variants of the kernels that have some."""
    return sorted({row.variant for row in table.rows if row.variant != HOST})


def _label(table: Table) -> Column[KernelRow]:
    """The kernel's name, with its variant where a note cannot say it for all."""
    several = len(_variants(table)) > 1
    return "kernel", lambda row: row.label if several and row.variant != HOST else row.kernel


def _spread_text(row: KernelRow) -> str:
    half = 50 * (row.time.high_ms - row.time.low_ms) / row.time.median_ms
    return f"{half:.1f}%" if half < 9.95 else f"{half:.0f}%"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 10 else f"{value:.1e}"


def _words(table: Table) -> list[str]:
    """What is known of a table besides its numbers."""
    first = table.rows[0]
    words = [f"method {first.time.method}", f"{first.time.n} samples", first.source]
    if len(_variants(table)) == 1:
        words.append(f"variant {_variants(table)[0]}")
    sources: dict[str, list[str]] = {}
    for row in table.rows:
        sources.setdefault(row.config_source, []).append(row.kernel)
    named = {source: kernels for source, kernels in sources.items() if source}
    if len(named) == 1:
        words.append(f"configs {next(iter(named))}")
    else:
        words += [f"config {source}: {', '.join(kernels)}" for source, kernels in named.items()]
    if first.reference:
        words.append(f"speed-up and L1 ref: against {first.reference}")
    floor = first.errors.rounding_floor
    words.append(f"rounding to {first.shape.dtype} alone: centred {floor:.4f}")
    return words


def _shared(tables: Sequence[Table]) -> list[str]:
    return [word for word in _words(tables[0]) if all(word in _words(one) for one in tables)]


def _notes(tables: Sequence[Table]) -> list[str]:
    """What holds for all tables."""
    notes = ["; ".join(_shared(tables))]
    if any(table.aa_ratio is not None for table in tables):
        notes[0] += f"; A/A: {tables[0].rows[0].kernel} timed against itself"
    if any(row.note for table in tables for row in table.rows):
        notes.append(f"{EMULATION_NOTE}; only the errors say something")
    return notes


def _warnings(table: Table) -> Iterator[Text]:
    for row in table.rows:
        for reason in row.gate:
            yield Text(f"gate: {row.label}: {reason}", style="red")
    for reason in table.failed:
        yield Text(f"left out: {reason}", style="yellow")


def _summary(tables: Sequence[Table], width: int) -> list[RenderableType]:
    """How often each kernel passed over several inputs, its worst error, its speed-up."""
    reference = next((row.reference for t in tables for row in t.rows if row.reference), "")
    rows = [row for one in tables for row in one.rows]
    emulated = any(row.note for row in rows if row.label == reference)
    of = {label: [row for row in rows if row.label == label] for label in [r.label for r in rows]}

    def speedup(label: str) -> str:
        ratios = [row.speedup for row in of[label] if row.speedup is not None]
        mean = f"{geometric_mean(ratios):.2f}x" if ratios else "1"
        return "-" if emulated or of[label][0].note else mean

    columns: list[Column[str]] = [
        ("inputs", lambda label: str(len(of[label]))),
        ("gate ok", lambda label: str(sum(not row.gate for row in of[label]))),
        ("rel L1", lambda label: _error(max(row.errors.worst_head_rel_l1 for row in of[label]))),
        ("cosine", lambda label: f"{min(row.errors.worst_head_cosine for row in of[label]):.5f}"),
    ]
    if reference:
        columns.append(("speed-up", speedup))
    over = f"; speed-up over {reference}" if reference else ""
    title = Text(f"All {len(tables)} inputs, worst errors{over}", style="bold")
    return [title, *fitted(list(of), ("kernel", str), [columns], width)]


def _difference(row: KernelRow, found: OutputDifference, width: int) -> list[RenderableType]:
    """Plain statistics of one output against the reference."""
    spreads = {
        row.reference or "exact": found.reference,
        row.label: found.test,
        "absolute error": found.abs_error,
    }
    columns: list[Column[str]] = [
        (name, lambda of, name=name: f"{getattr(spreads[of], name):.4g}")  # type: ignore[misc]
        for name in ("min", "max", "mean", "std")
    ]
    columns.append(("NaN/Inf", lambda of: str(spreads[of].bad_values)))
    sizes = "x".join(map(str, found.shape))
    lines = (
        f"cosine {found.cosine:.6f}; rows: mean {found.row_cosine_mean:.6f}, "
        f"median {found.row_cosine_median:.6f}, 10th percentile {found.row_cosine_p10:.6f}, "
        f"{found.rows_above:.2%} above 0.99",
        f"{found.upstream_fails:.3%} of values off by more than 0.3 and 25 %",
        "",
    )
    title = Text(f"{row.input}: {row.label} against {row.reference or 'exact'}, rows {sizes}")
    table = fitted(list(spreads), ("values", str), [columns], width)
    return [title, *table, *(Text(line) for line in lines)]
