"""What a comparison comes to, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from sage_plugin.bench.rows import KernelRow, Table
from sage_plugin.kernels.contract import HOST

NOT_QUANTIZED = ("fav2", "bf16")


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
    kernels = dict.fromkeys(row.label for row in real if row.variant != HOST)
    passing = [label for label in kernels if label not in broken]
    if not passing and not any(row.note for row in rows):
        return f"{gates.capitalize()}."
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
    """The most exact kernel of those that quantize, which all others are more exact than."""
    errors: dict[str, float] = {}
    for row in rows:
        if row.variant != HOST and row.kernel not in NOT_QUANTIZED:
            errors[row.kernel] = max(errors.get(row.kernel, 0.0), row.errors.centred_rel_l1)
    if not errors:
        return ""
    best = min(errors, key=errors.__getitem__)
    return f"Most exact of those that quantize: {best} (centred error {errors[best]:.4f}). "


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
