"""What patched linears did, one row each, and as text by role."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.plugin.experts.layer import ExpertsLayer
from sage_plugin.plugin.linears.layer import LinearLayer

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class LinearReport:
    """Counts of one patched linear; calls inside compiled graphs are not counted.

    Attributes:
        layer: module path with the component in front.
        role: what it is for, as text.
        kernel: kernel that its weight is quantized for, `None` where it is not.
        calls: calls by `kernel:backend`.
        fallbacks: calls that ran with the original weight, by reason.
        saved_bytes: memory that the weight takes less on its device; negative where the original
            is there too.
        rules: calls by the number of the policy's rule that chose the kernel, from 1.
        config_sources: calls by where their launch config came from, of products that have one.
        saved_ms: milliseconds saved over torch's own linear, by the times that the configs were
            tuned with; 0 where none were.
        timed_calls: how many of the calls that is the sum of.
        label: the kernel with what is done to input channels before, `int8_row+rotation=64`.
    """

    layer: str
    role: str
    kernel: str | None
    calls: dict[str, int]
    fallbacks: dict[FallbackReason, int]
    saved_bytes: int
    rules: dict[int, int]
    config_sources: dict[str, int] = field(default_factory=dict)
    saved_ms: float = 0.0
    timed_calls: int = 0
    label: str = ""

    def kernel_calls(self) -> int:
        """Calls that multiplied 8-bit values."""
        return sum(self.calls.values())

    def total_calls(self) -> int:
        """All calls of the linear."""
        return sum(self.calls.values()) + sum(self.fallbacks.values())


def row_of(layer: LinearLayer | ExpertsLayer) -> LinearReport:
    """What one linear, or the experts of one mixture, did."""
    counts = layer.counts
    return LinearReport(
        layer.name,
        layer.role.value,
        None if layer.quantized is None else layer.quantized.kernel,
        dict(counts.calls),
        dict(counts.fallbacks),
        layer.saved_bytes(),
        dict(counts.rules),
        dict(counts.config_sources),
        counts.saved_ms,
        counts.timed_calls,
        "" if layer.quantized is None else layer.quantized.label,
    )


def text_of(rows: Sequence[LinearReport], left: Mapping[str, str]) -> Iterator[str]:
    """Lines of a report, each to be wrapped; nothing where linears are not patched."""
    if not rows and not left:
        return
    on_kernel = [row for row in rows if row.kernel is not None]
    by_kernel = Counter(row.label for row in on_kernel)
    told = ", ".join(f"{count} on {kernel}" for kernel, count in by_kernel.items()) or "none taken"
    count = len(rows) + len(left)
    yield f"{count} linears: {told}; their weights take {_memory(rows)} of their device"
    for role, members in _by_role(rows).items():
        calls = sum((Counter(row.calls) for row in members), Counter[str]())
        fallbacks = sum((Counter(row.fallbacks) for row in members), Counter[FallbackReason]())
        parts = [f"{len(members)} linears", *(f"{label} x{n}" for label, n in calls.items())]
        sources = sum((Counter(row.config_sources) for row in members), Counter[str]())
        parts += [f"config {source} x{n}" for source, n in sources.items()]
        if any(row.timed_calls for row in members):
            parts.append(f"saved {sum(row.saved_ms for row in members):.1f} ms")
        parts += [f"fallback x{n}: {reason}" for reason, n in fallbacks.items()]
        parts.append(_memory(members))
        yield f"  {role}: {'; '.join(parts)}"
    for why, count in Counter(left.values()).items():
        yield f"  left: {count}, {why}"


def _memory(rows: Sequence[LinearReport]) -> str:
    saved = sum(row.saved_bytes for row in rows)
    return f"{abs(saved) / MEBIBYTE:,.1f} MiB {'less' if saved >= 0 else 'more'}"


def _by_role(rows: Sequence[LinearReport]) -> dict[str, list[LinearReport]]:
    groups: defaultdict[str, list[LinearReport]] = defaultdict(list)
    for row in rows:
        groups[row.role].append(row)
    return groups
