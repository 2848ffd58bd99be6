"""A report as text: what matters on top, equal layers together, 80 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sage_plugin.kernels.fallback import Fallback
from sage_plugin.kernels.launch_config import fill_command
from sage_plugin.plugin.context import layer_form
from sage_plugin.plugin.linears import report as of_linears

if TYPE_CHECKING:
    from sage_plugin.plugin.report import LayerReport, PluginReport

WIDTH = 80
MOST_GROUPS = 6
"""Groups that are shown before the rest is summed up."""
MOST_RANGES = 3
"""Ranges of block numbers in a name before they become a star."""
EMULATION = ":emulation"
STALE = ", stale"
"""How the source of a config ends that was tuned with other software (`ResolvedConfig.mark`)."""


def render(report: PluginReport, *, every_layer: bool = False) -> str:
    """The lines of a report.

    Args:
        report: what is shown.
        every_layer: give each layer lines of its own.
    """
    groups = [(row.layer, [row]) for row in report.rows] if every_layer else grouped(report.rows)
    shown = groups if every_layer else groups[:MOST_GROUPS]
    lines = list(_summary(report))
    for name, rows in shown:
        lines += [name, *wrapped(_what_ran(rows))]
    if rest := [row for _, rows in groups[len(shown) :] for row in rows]:
        lines.append(f"and {len(rest)} more layers; text(every_layer=True) shows all")
        lines += wrapped(_what_ran(rest))
    for line in of_linears.text_of(report.linears, report.linears_left):
        indent = line[: len(line) - len(line.lstrip())]
        lines += wrapped(line.lstrip(), indent)
    for what, names in _by_reason(report.skipped):
        lines += wrapped(f"not patched: {_named(names)} ({what})", "")
    if report.lost:
        lines += wrapped(f"patch lost: {_named(report.lost)} (its processor was replaced)", "")
    for rule in report.idle_rules:
        lines += wrapped(f"never met: {rule}", "")
    return "\n".join(lines)


def grouped(rows: Sequence[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    """Rows that differ in the numbers of their paths alone, by one name, in the rows' order.

    `blocks.*.attn1` are all layers of that form, and `blocks.1-29.attn1` some of them.
    """
    groups: defaultdict[object, list[LayerReport]] = defaultdict(list)
    for row in rows:
        groups[layer_form(row.layer), _counts(row)].append(row)
    every: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        every[layer_form(row.layer)].append(row.layer)
    named = []
    for members in groups.values():
        layers = [row.layer for row in members]
        name = shared_name(layers, every[layer_form(layers[0])])
        named.append((name if len(layers) == 1 else f"{name}, {len(layers)} layers", members))
    return named


def shared_name(layers: Sequence[str], every: Sequence[str]) -> str:
    """One path for layers that differ in numbers, among all layers of that form.

    Example:
        >>> blocks = [f"blocks.{i}.attn" for i in range(4)]
        >>> shared_name(blocks, blocks), shared_name(blocks[1:], blocks)
        ('blocks.*.attn', 'blocks.1-3.attn')
    """
    parts = []
    for place, part in enumerate(layers[0].split(".")):
        mine, others = ({name.split(".")[place] for name in names} for names in (layers, every))
        if len(mine) == 1:
            parts.append(part)
        elif mine == others:
            parts.append("*")
        else:
            text = ranges(sorted(map(int, mine)), ",")
            parts.append("*" if text.count(",") >= MOST_RANGES else text)
    return ".".join(parts)


def ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Sorted numbers as text.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return separator.join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _summary(report: PluginReport) -> Iterator[str]:
    ran, total = report.kernel_calls(), report.total_calls()
    timed = sum(row.timed_calls for row in report.rows)
    timed += sum(row.timed_calls for row in report.linears)
    saved = report.saved_ms()
    every = ran + sum(row.kernel_calls() for row in report.linears)
    passed, unit = (report.steps, "step") if report.steps else (report.forwards, "forward")
    if timed and passed:
        what = "saved over" if saved >= 0 else "lost against"
        yield f"about {abs(saved) / passed:.1f} ms {what} the baseline per {unit},"
        yield f"  by the times that tuning took of {timed} of the {every} kernel calls"
    share = f" ({100 * ran / total:.0f} %)" if total else ""
    yield f"{ran} of {total} calls ran on a kernel{share}; calls in graphs are not counted"
    if total and not ran:
        fallbacks = sum((Counter(row.fallbacks) for row in report.rows), Counter())
        for reason, _ in fallbacks.most_common(1):
            short = reason.cause is Fallback.SHORTER_THAN_MIN_SEQ
            yield f"  most often: {reason}" + ("; patch(..., min_seq=0) tries them" * short)
    untuned = sum(
        row.config_sources.get("default", 0)
        for row in report.rows
        if not all(label.endswith(EMULATION) for label in row.calls)
    )
    if untuned:
        yield f"{untuned} calls ran on default configs, which"
        yield f"  `{fill_command()}` tunes"
    stale = sum(
        n for row in report.rows for mark, n in row.config_sources.items() if mark.endswith(STALE)
    )
    if stale:
        yield f"{stale} calls ran on configs that were tuned with other software, which"
        yield "  `sage configs revalidate` measures again"


def _what_ran(rows: Sequence[LayerReport]) -> str:
    """What became of the calls of rows, and by what."""
    total = sum(row.total_calls() for row in rows)
    if not total:
        return "no calls"
    parts = [f"{sum(row.kernel_calls() for row in rows)} of {total} on a kernel"]
    parts += _sums((row.calls for row in rows), "{} x{}")
    parts += _sums((row.config_sources for row in rows), "config {} x{}")
    steps: defaultdict[int, set[int]] = defaultdict(set)
    for row in rows:
        for rule, seen in row.rule_steps.items():
            steps[rule].update(seen)
    rules = sum((Counter(row.rules) for row in rows), Counter[int]())
    fallbacks = sum((Counter(row.fallbacks) for row in rows), Counter())
    left = {reason.detail for reason in fallbacks if reason.cause is Fallback.POLICY}
    for rule, count in sorted(rules.items()):
        at = f" at steps {ranges(sorted(steps[rule]))}" if steps[rule] else ""
        parts.append(f"rule {rule} x{count}{at}" + (" (not on a kernel)" if rule in left else ""))
    if fused := sum(row.fused for row in rows):
        parts.append(f"norm and RoPE in one kernel x{fused}")
    if quantized := sum(row.in_quantization for row in rows):
        parts.append(f"which quantized Q x{quantized}")
    one_pass = sum((Counter(row.one_pass) for row in rows), Counter())
    parts += [
        f"which did not quantize Q x{n}: {why.value}" for why, n in one_pass.items() if why.is_told
    ]
    unfused = sum((Counter(row.unfused) for row in rows), Counter())
    parts += [
        f"norm and RoPE as they were x{n}: {why.value}" for why, n in unfused.items() if why.is_told
    ]
    if any(row.timed_calls for row in rows):
        parts.append(f"saved {sum(row.saved_ms for row in rows):.1f} ms")
    parts += [
        f"fallback x{count}: {reason}"
        for reason, count in fallbacks.items()
        if reason.cause is not Fallback.POLICY  # which the rules tell
    ]
    return "; ".join(parts)


def _sums(counts: Iterable[Mapping[str, int]], form: str) -> Iterator[str]:
    total = sum(map(Counter, counts), Counter[str]())
    return (form.format(name, count) for name, count in total.items())


def _counts(row: LayerReport) -> str:
    """All that a row holds but its name."""
    return repr(dataclasses.replace(row, layer="", saved_ms=round(row.saved_ms, 6)))


def _by_reason(skipped: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Layers by why they are skipped and by form, with the reason."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, why in skipped.items():
        groups[why, layer_form(name)].append(name)
    return [(why, names) for (why, _), names in groups.items()]


def _named(layers: Sequence[str]) -> str:
    if len(layers) == 1:
        return layers[0]
    forms = {layer_form(layer) for layer in layers}
    name = shared_name(layers, ()) if len(forms) == 1 else f"{layers[0]} and others"
    return f"{name}, {len(layers)} layers"


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Cut a text into lines of a terminal, those after the first farther in."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
