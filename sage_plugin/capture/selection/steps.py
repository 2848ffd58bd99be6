"""Which denoising steps a user selected, as ranges: `"0,5,10-14,20-"`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from sage_plugin.errors import UsageError

_RANGE = re.compile(r"(\d{1,18})(?:(-)(\d{0,18}))?")


@dataclass(frozen=True, slots=True)
class StepSelection:
    """Sorted, disjoint ranges of steps.

    Attributes:
        ranges: pairs of first and last step, both included; a last step of `None` has no end.
        every: of those, only the steps that it divides.

    Example:
        >>> selection = StepSelection.parse("0,5,10-14")
        >>> 12 in selection, 13 in StepSelection.parse("0,5"), selection.count_below(12)
        (True, False, 4)
    """

    ranges: tuple[tuple[int, int | None], ...] = ((0, None),)
    every: int = 1

    @classmethod
    def parse(cls, steps: str | int | Iterable[int] | None, every: int = 1) -> Self:
        """Read a selection from its text form, from numbers, or from `None` for all steps.

        Raises:
            UsageError: text that is no list of steps and ranges, a negative step, or an `every`
                below 1.
        """
        if every < 1:
            raise UsageError(f"every: got {every}, expected at least 1 (2 is every second step)")
        if steps is None:
            return cls(every=every)
        if isinstance(steps, str):
            parts = [_parse_range(part.strip(), steps) for part in steps.split(",")]
        else:
            numbers = [steps] if isinstance(steps, int) else list(steps)
            if not numbers or any(not isinstance(n, int) or n < 0 for n in numbers):
                raise UsageError(f"steps: got {steps!r}, expected step numbers from 0 on")
            parts = [(n, n) for n in numbers]
        return cls(_merged(parts), every)

    def __contains__(self, step: int) -> bool:
        inside = any(low <= step and (high is None or step <= high) for low, high in self.ranges)
        return inside and step % self.every == 0

    def count_below(self, step: int) -> int:
        """How many selected steps come before `step`; for a selected step, its ordinal."""
        ends = ((low, step if high is None else min(step, high + 1)) for low, high in self.ranges)
        return sum(self._multiples(end) - self._multiples(low) for low, end in ends if end > low)

    def _multiples(self, end: int) -> int:
        """How many steps below `end` are divided by `every`."""
        return -(-end // self.every)


def _parse_range(part: str, whole: str) -> tuple[int, int | None]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(f'steps: got {whole!r}, expected numbers and ranges such as "0,5,10-14"')
    low, dash, last = match.groups()
    high = int(low) if dash is None else int(last) if last else None
    if high is not None and high < int(low):
        raise UsageError(f"steps: the range {part!r} runs backwards")
    return int(low), high


def _merged(parts: list[tuple[int, int | None]]) -> tuple[tuple[int, int | None], ...]:
    """Sort ranges and join those that overlap or touch."""
    merged: list[tuple[int, int | None]] = []
    for low, high in sorted(parts, key=lambda p: p[0]):
        if merged:
            first, last = merged[-1]
            if last is None:
                break
            if low <= last + 1:
                merged[-1] = (first, None if high is None else max(last, high))
                continue
        merged.append((low, high))
    return tuple(merged)
