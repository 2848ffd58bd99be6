"""Accuracy limits: what they are, what breaks them, and the worst of several captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sage_plugin.errors import UnknownKernelError, UsageError
from sage_plugin.schema import ErrorMetrics, JsonRecord


@dataclass(frozen=True, slots=True)
class Gate(JsonRecord):
    """Limits that the worst head of the worst capture must keep.

    Attributes:
        min_cosine: least cosine of a head.
        min_row_cosine_p10: least 10th percentile of the cosine of a head's rows.
        max_worst_head_rel_l1: largest relative L1 of a head.
        max_centred_rel_l1: largest relative L1 of the centred output, which no common mean of V can
            make small.
        max_bad_values: NaN and infinite values allowed.
    """

    min_cosine: float
    min_row_cosine_p10: float | None = None
    max_worst_head_rel_l1: float | None = None
    max_centred_rel_l1: float | None = None
    max_bad_values: int = 0


def gate_of(gates: Mapping[str, Gate], kernel: str) -> Gate:
    """Return the gate of a kernel.

    Raises:
        UnknownKernelError: no kernel has this name.
    """
    if kernel not in gates:
        raise UnknownKernelError(
            f"kernel {kernel!r} is not known; choose one of {', '.join(gates)}"
        )
    return gates[kernel]


def failures(gate: Gate, metrics: ErrorMetrics) -> list[str]:
    """List a sentence, with value and limit, for each limit that is broken; empty if it passes.

    Example:
        >>> bad = ErrorMetrics(1, 0, 1, 1, 0, 1, 0, 0, 1, 0, bad_values=3)
        >>> failures(Gate(0.99), bad)[0]
        '3 NaN or infinite values in the output, allowed are 0'
    """
    found = []
    if metrics.bad_values > gate.max_bad_values:
        found.append(
            f"{metrics.bad_values} NaN or infinite values in the output, "
            f"allowed are {gate.max_bad_values}"
        )
    if metrics.suspect:
        found.append(f"the run is not to be trusted: {metrics.suspect}")
    cosine = min(metrics.cosine, metrics.worst_head_cosine)
    row_p10 = min(metrics.row_cosine_p10, metrics.worst_head_row_cosine_p10)
    rel_l1 = max(metrics.rel_l1, metrics.worst_head_rel_l1)
    # `not >=` rather than `<`: a NaN must fail.
    if not cosine >= gate.min_cosine:
        found.append(f"cosine of the worst head is {cosine:.7f}, at least {gate.min_cosine} needed")
    limit = gate.min_row_cosine_p10
    if limit is not None and not row_p10 >= limit:
        found.append(
            f"10th percentile of the row cosine is {row_p10:.7f} in the worst head, "
            f"at least {limit} needed"
        )
    limit = gate.max_worst_head_rel_l1
    if limit is not None and not rel_l1 <= limit:
        found.append(f"relative L1 of the worst head is {rel_l1:.4f}, at most {limit} allowed")
    limit = gate.max_centred_rel_l1
    if limit is not None and not metrics.centred_rel_l1 <= limit:
        found.append(
            f"relative L1 of the centred output is {metrics.centred_rel_l1:.4f}, "
            f"at most {limit} allowed"
        )
    return found


def _farthest_from_one(values: Sequence[float]) -> float:
    return max(values, key=lambda value: abs(value - 1))


def _distinct(values: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(value for value in values if value))


_WORST: dict[str, Callable[[Sequence[float]], float] | Callable[[Sequence[str]], str]] = {
    "cosine": min,
    "row_cosine_p10": min,
    "worst_head_cosine": min,
    "worst_head_row_cosine_p10": min,
    "gain": _farthest_from_one,
    "bad_values": sum,
    "suspect": _distinct,
}


def worst(metrics: Sequence[ErrorMetrics]) -> ErrorMetrics:
    """Take the worst value of each metric over several captures: passes a gate only if all pass.

    Raises:
        UsageError: there are none.

    Example:
        >>> one = ErrorMetrics(0.1, 0.9, 1, 1, 0.9, 0.1, 0.9, 1.1, 0.1, 0.0, bad_values=0)
        >>> two = ErrorMetrics(0.2, 0.8, 1, 1, 0.8, 0.2, 0.8, 0.5, 0.2, 0.0, bad_values=1)
        >>> merged = worst([one, two])
        >>> merged.rel_l1, merged.cosine, merged.gain, merged.bad_values
        (0.2, 0.8, 0.5, 1)
    """
    if not metrics:
        raise UsageError("worst: got no metrics, needs those of at least one capture")
    values: dict[str, Any] = {}
    for field in fields(ErrorMetrics):
        merge = _WORST.get(field.name, max)
        given = [getattr(m, field.name) for m in metrics]
        values[field.name] = None if None in given else merge(given)
    return ErrorMetrics(**values)
