"""Who is still timed in a race: what surely cannot win is dropped, and the race ends when it must.

Numbers only: a race of real kernels, a test and a simulation ask the same rule. Dropping is cheap
to get wrong (a little speed is lost), so it asks for less certainty than a win, whose share of the
risk is split among all challengers and all looks.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sage_plugin.measure.statistics import gain_interval

BASE, AGAIN = "0", "again"
"""The first finalist, and the same once more: how far two timings of one config differ."""

LOOKS = (8, 12, 18, 27, 40, 60, 90, 130)
"""Rounds after which the rule looks; the more often, the less each look may claim."""

DROP_CONFIDENCE = 0.98
FALSE_WIN = 0.01
"""Chance that a race of configs that are all alike has a winner, whatever `min_gain`."""

EQUAL = 0.0025
"""Configs are equal once the interval of their difference is narrower than this."""


def win_confidence(challengers: int) -> float:
    """Coverage that the interval of each challenger needs, at each look (Bonferroni)."""
    return 1 - 2 * FALSE_WIN / (max(1, challengers) * len(LOOKS))


@dataclass(frozen=True, slots=True)
class Elimination:
    """The rule of one race.

    Attributes:
        challengers: names of what is compared with the first.
        min_gain: gain over the first that a winner needs; `None` where the first is no baseline.
        rounds: after so many, several sure winners are equals and the fastest is taken.
    """

    challengers: tuple[str, ...]
    min_gain: float | None
    rounds: int

    def __call__(self, ms: Mapping[str, Sequence[float]]) -> Collection[str]:
        """Return the names to time on; none ends the race."""
        taken = len(ms[BASE])
        running = [name for name in self.challengers if len(ms[name]) == taken]
        if taken < 2 or taken not in LOOKS:
            return (*ms,) if len(running) == len(self.challengers) else (BASE, AGAIN, *running)
        if taken == LOOKS[-1]:
            return ()
        leader = self._leader(running, ms)
        left = [
            name
            for name in running
            if self._may_win(ms[BASE], ms[name])
            and (name == leader or _gain(ms[leader], ms[name], DROP_CONFIDENCE)[1] > 0)
        ]
        return () if self._decided(left, ms, taken) else (BASE, AGAIN, *left)

    def _leader(self, running: list[str], ms: Mapping[str, Sequence[float]]) -> str:
        rivals = running if self.min_gain is not None else [BASE, *running]
        return min(rivals, key=lambda name: statistics.median(ms[name]), default=BASE)

    def _may_win(self, base: Sequence[float], new: Sequence[float]) -> bool:
        return self.min_gain is None or _gain(base, new, DROP_CONFIDENCE)[1] > self.min_gain

    def _decided(self, left: list[str], ms: Mapping[str, Sequence[float]], taken: int) -> bool:
        if not left:
            return True
        if self.min_gain is None:
            return taken >= self.rounds
        needed = max(self.min_gain, abs(aa_ratio(ms) - 1))
        confidence = win_confidence(len(self.challengers))
        intervals = [_gain(ms[BASE], ms[name], confidence) for name in left]
        sure = all(low > needed for low, _ in intervals)
        narrow = all(high - low < EQUAL for low, high in intervals)
        return (sure and (len(left) == 1 or taken >= self.rounds)) or narrow


def aa_ratio(ms: Mapping[str, Sequence[float]]) -> float:
    """Time of the first finalist over its own: 1 in a perfect measurement."""
    return statistics.median(ms[AGAIN]) / statistics.median(ms[BASE])


def _gain(base: Sequence[float], new: Sequence[float], confidence: float) -> tuple[float, float]:
    """Bounds of the gain, from the rounds that both took part in."""
    both = min(len(base), len(new))
    _, low, high = gain_interval(base[:both], new[:both], confidence)
    return low, high
