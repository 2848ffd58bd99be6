"""How a comparison looks on a terminal: one table per input, a summary over several, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean

from rich.console import Group, RenderableType
from rich.text import Text

from sage_plugin.bench.difference import OutputDifference
from sage_plugin.bench.rows import EMULATION_NOTE, KernelRow, Table
from sage_plugin.cli.tables import STAMP_STYLES, Column, digits, fitted, grid
from sage_plugin.families import describe
from sage_plugin.kernels.contract import HOST


def render(table: Table, metrics: Sequence[str], *, width: int) -> RenderableType:
    """Render one input: a row per kernel, speed on the left and error on the right, or below."""
    label: Column[KernelRow] = ("kernel", lambda row: _label(row, table))
    groups = [_speeds(table, metrics), _errors(table)]
    return Group(_title(table), *fitted(table.rows, label, groups, width), *_captions(table))


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


def _label(row: KernelRow, table: Table) -> str:
    """The kernel's name, with its variant where the caption cannot say it for all."""
    return row.label if row.variant != HOST and len(_variants(table)) > 1 else row.kernel


def _spread_text(row: KernelRow) -> str:
    half = 50 * (row.time.high_ms - row.time.low_ms) / row.time.median_ms
    return f"{half:.1f}%" if half < 9.95 else f"{half:.0f}%"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 10 else f"{value:.1e}"


def _captions(table: Table) -> list[Text]:
    first = table.rows[0]
    words = [f"method {first.time.method}, {first.time.n} samples, {first.source}"]
    if len(_variants(table)) == 1:
        words.append(f"variant {_variants(table)[0]}")
    sources = sorted({row.config_source for row in table.rows if row.config_source})
    if sources:
        words.append("configs " + "/".join(sources))
    if first.reference:
        words.append(f"speed-up and L1 ref: against {first.reference}")
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
    """Render over several inputs how often each kernel passed, its worst error, its speed-up."""
    reference = next((row.reference for t in tables for row in t.rows if row.reference), "")
    rows = [row for one in tables for row in one.rows]
    emulated = any(row.note for row in rows if row.label == reference)
    table = grid("kernel", "inputs", "gate ok", "rel L1", "cosine", *["speed-up"] * bool(reference))
    for label in dict.fromkeys(row.label for row in rows):
        own = [row for row in rows if row.label == label]
        cells = [
            label,
            str(len(own)),
            str(sum(not row.gate for row in own)),
            _error(max(row.errors.worst_head_rel_l1 for row in own)),
            f"{min(row.errors.worst_head_cosine for row in own):.5f}",
        ]
        ratios = [row.speedup for row in own if row.speedup is not None]
        if reference:
            mean = f"{geometric_mean(ratios):.2f}x" if ratios else "1"
            cells.append("-" if emulated or own[0].note else mean)
        table.add_row(*cells)
    over = f"; speed-up over {reference}" if reference else ""
    return Group(Text(f"All {len(tables)} inputs, worst errors{over}", style="bold"), table)


def verdict(tables: Sequence[Table]) -> str:
    """Say in one sentence which kernel to take, and whether the gates pass."""
    rows = [row for table in tables for row in table.rows]
    broken = [row.label for row in rows if row.gate]
    gates = (
        f"gates fail for {', '.join(dict.fromkeys(broken))}"
        if broken
        else "all accuracy gates pass"
    )
    real = [row for row in rows if not row.note]
    kernels = dict.fromkeys(row.label for row in real if row.kernel not in ("sdpa", "torch"))
    passing = [label for label in kernels if label not in broken]
    if not passing:
        exact = _most_exact([row for row in rows if row.note and not row.gate])
        return f"No speed on a CPU, where kernels are emulated. {exact}{gates.capitalize()}."
    means = {label: _gain(tables, label) for label in passing}
    best = max(passing, key=lambda label: means[label][0])
    ratio, over, interval = means[best]
    error = max(row.errors.centred_rel_l1 for row in real if row.label == best)
    return (
        f"{best} is {ratio:.2f} times as fast as {over}{interval}, centred error {error:.4f}; "
        f"{gates}."
    )


def _most_exact(rows: Sequence[KernelRow]) -> str:
    errors: dict[str, float] = {}
    for row in rows:
        errors[row.kernel] = max(errors.get(row.kernel, 0.0), row.errors.centred_rel_l1)
    if not errors:
        return ""
    best = min(errors, key=errors.__getitem__)
    return f"Most exact: {best} (centred error {errors[best]:.4f}). "


def _gain(tables: Sequence[Table], label: str) -> tuple[float, str, str]:
    """Speed of a kernel over what it is compared with, else SDPA; its interval on one input."""
    pairs = [(table, row) for table in tables for row in table.rows if row.label == label]
    paired = [row for _, row in pairs if row.speedup is not None]
    if paired:
        ratio = geometric_mean([row.speedup for row in paired if row.speedup is not None])
        ends = (paired[0].speedup_low, paired[0].speedup_high)
        known = len(paired) == 1 and None not in ends
        return ratio, paired[0].reference, f" ({ends[0]:.2f} to {ends[1]:.2f})" if known else ""
    baselines = [
        next((one for one in table.rows if one.kernel == "sdpa"), table.rows[0])
        for table, _ in pairs
    ]
    own = geometric_mean([row.time.median_ms for _, row in pairs])
    other = geometric_mean([one.time.median_ms for one in baselines])
    return other / own, baselines[0].kernel, ""


def render_difference(row: KernelRow, found: OutputDifference) -> RenderableType:
    """Render plain statistics of one output against the reference."""
    table = grid("values", "min", "max", "mean", "std", "NaN/Inf")
    for name, spread in (
        (row.reference or "exact", found.reference),
        (row.label, found.test),
        ("absolute error", found.abs_error),
    ):
        values = (spread.min, spread.max, spread.mean, spread.std)
        table.add_row(name, *(f"{value:.4g}" for value in values), str(spread.bad_values))
    sizes = "x".join(map(str, found.shape))
    lines = (
        f"cosine {found.cosine:.6f}; rows: mean {found.row_cosine_mean:.6f}, "
        f"median {found.row_cosine_median:.6f}, 10th percentile {found.row_cosine_p10:.6f}, "
        f"{found.rows_above:.2%} above 0.99",
        f"{found.upstream_fails:.3%} of values off by more than 0.3 and 25 %",
        "",
    )
    title = Text(f"{row.input}: {row.label} against {row.reference or 'exact'}, rows {sizes}")
    return Group(title, table, *(Text(line) for line in lines))
