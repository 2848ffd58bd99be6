"""What a session asks for: a candidate screened, some raced. A child does it, a test scripts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sage_plugin.schema import LaunchConfig, Trial
from sage_plugin.tune.run.study import Study


@dataclass(frozen=True, slots=True)
class Race:
    """The finalists of a study.

    Attributes:
        configs: what is raced; the first is what the others are compared with.
        incumbent: what the registry holds now, where it is among them.
        budget_s: longest race, in seconds.
        seed: of the order within the rounds.
    """

    configs: tuple[LaunchConfig, ...]
    incumbent: LaunchConfig | None
    budget_s: float
    seed: int = 0


class Runner(Protocol):
    """Runs candidates and never raises for what a candidate does: a failure is a trial, too."""

    def screen(self, study: Study, config: LaunchConfig, base: LaunchConfig | None) -> Trial:
        """Judge one config on all inputs, then time it briefly against `base`.

        `extra["ratio"]` is its time over that of `base` in the same measurement, or its time in
        milliseconds where there is no base to compare with.
        """

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        """Time the finalists interleaved; one trial each, in their order.

        `extra` holds `gain`, `gain_low` and `gain_high` over the first, `aa_ratio` (the first
        against itself), `throttled`, and where there is an incumbent `gain_low_over_incumbent`
        and `incumbent` (1 for it).
        """

    def close(self) -> None:
        """End what was started; the runner is not used again."""
