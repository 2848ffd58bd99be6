"""A band of denoising steps: `"0:5"`, `"-3:"`, `"20%:80%"`, or all of them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Self

from sage_plugin.errors import ConfigError, UsageError

MAX_BANDS = 100
_BOUND = re.compile(r"(-?\d{1,9})(%?)")


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a band begins or ends.

    Attributes:
        value: a step from 0 on, from the end where it is negative, or percents of all steps.
        percent: whether it is percents.
    """

    value: int
    percent: bool = False

    @property
    def needs_total(self) -> bool:
        """Whether it depends on how many steps there are."""
        return self.percent or self.value < 0

    def at(self, total: int | None) -> int:
        """The step, of `total` steps; 50 % of 7 are 4, as 3.5 is rounded up."""
        if not self.needs_total:
            return self.value
        assert total is not None, "a band whose total is unknown is refused before it is asked"
        if self.percent:
            return (2 * total * self.value + 100) // 200
        return max(0, total + self.value)


@dataclass(frozen=True, slots=True)
class Band:
    """Steps from `begin` up to, not including, `end`; `None` for the first and past the last.

    Example:
        >>> band = Band.parse("20%:-1")
        >>> [step for step in range(10) if band.contains(step, 10)]
        [2, 3, 4, 5, 6, 7, 8]
    """

    begin: Bound | None = None
    end: Bound | None = None

    @classmethod
    @functools.lru_cache(maxsize=256)
    def parse(cls, text: str) -> Self:
        """Read a band as a policy file writes it; empty text is all steps.

        Raises:
            ConfigError: it is no band.
        """
        if not text:
            return cls()
        parts = text.split(":")
        if len(parts) != 2:
            raise ConfigError(_complaint(text))
        begin, end = (_bound(part.strip(), text) for part in parts)
        band = cls(begin, end)
        if band._is_surely_empty():
            raise ConfigError(f"steps {text!r} hold no step; a band ends after it begins")
        return band

    @property
    def needs_total(self) -> bool:
        """Whether the number of steps has to be known."""
        return any(bound is not None and bound.needs_total for bound in (self.begin, self.end))

    def contains(self, step: int, total: int | None) -> bool:
        """Whether a step, counted from 0, lies in the band."""
        return (self.begin is None or self.begin.at(total) <= step) and (
            self.end is None or step < self.end.at(total)
        )

    def covers(self, other: Band) -> bool:
        """Whether it surely holds all steps of another, however many there are."""
        return _not_later(self.begin, other.begin, first=True) and _not_later(
            other.end, self.end, first=False
        )

    def _is_surely_empty(self) -> bool:
        begin, end = self.begin, self.end
        return begin is not None and end is not None and _comparable(begin, end) and (
            begin.value >= end.value
        )  # fmt: skip


def equal_bands(count: int, steps: int | None) -> tuple[str, ...]:
    """Bands of nearly equal length in percents, at most one a step; one where no steps are known.

    Raises:
        UsageError: `count` is not from 1 to 100.

    Example:
        >>> equal_bands(4, 20)
        (':25%', '25%:50%', '50%:75%', '75%:')
        >>> equal_bands(4, None), equal_bands(10, 2)
        (('',), (':50%', '50%:'))
    """
    if not 1 <= count <= MAX_BANDS:
        raise UsageError(f"--step-ranges {count}: use 1 to {MAX_BANDS} ranges of denoising steps")
    count = min(count, steps or 1)
    edges = [f"{round(100 * i / count)}%" for i in range(1, count)]
    if not edges:
        return ("",)
    return tuple(f"{a}:{b}" for a, b in zip(["", *edges], [*edges, ""], strict=True))


def _bound(text: str, whole: str) -> Bound | None:
    if not text:
        return None
    match = _BOUND.fullmatch(text)
    if match is None or (match[2] and not 0 <= int(match[1]) <= 100):
        raise ConfigError(_complaint(whole))
    return Bound(int(match[1]), bool(match[2]))


def _comparable(a: Bound, b: Bound) -> bool:
    return a.percent == b.percent and (a.percent or (a.value < 0) == (b.value < 0))


def _not_later(a: Bound | None, b: Bound | None, *, first: bool) -> bool:
    """Whether `a` surely comes no later than `b`; `None` is the first step, or past the last."""
    if a == b or (a if first else b) is None:
        return True
    return a is not None and b is not None and _comparable(a, b) and a.value <= b.value


def _complaint(text: str) -> str:
    return (
        f"steps are {text!r}; write them as begin:end, each a step from 0 on, a negative one from "
        "the end, or percents from 0% to 100%, such as 0:5, -3: or 20%:80%"
    )
