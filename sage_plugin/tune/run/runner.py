"""What a session asks for: candidates judged, timed, raced. A child does it, a test scripts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sage_plugin.schema import AnyLaunch, Trial
from sage_plugin.tune.run.study import Study


@dataclass(frozen=True, slots=True)
class Race:
    """The finalists of a study.

    Attributes:
        configs: what is raced; the first is what the others are compared with.
        incumbent: what the registry holds now, where it is among them.
        budget_s: longest race, in seconds.
        seed: of the order within the rounds.
        min_gain: gain over the first that a winner needs; `None` where the first is no baseline.
    """

    configs: tuple[AnyLaunch, ...]
    incumbent: AnyLaunch | None
    budget_s: float
    seed: int = 0
    min_gain: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler says that the largest kernel of a config takes.

    Attributes:
        registers: per thread, `None` where it does not tell.
        spill_bytes: of a thread.
        smem_bytes: shared memory of a program.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    smem_bytes: int | None = None


class Runner(Protocol):
    """Runs candidates and never raises for what a candidate does: a failure is a trial, too."""

    def prepare(self, study: Study, configs: Sequence[AnyLaunch]) -> Mapping[AnyLaunch, Resources]:
        """Take note of what is asked for soon, so that it can be compiled meanwhile.

        Returns what is known of those that are compiled already.
        """

    def judge(self, study: Study, config: AnyLaunch) -> Trial:
        """Run one config on all inputs and hold it to the gate."""

    def screen(
        self, study: Study, judged: Sequence[Trial], base: AnyLaunch | None
    ) -> tuple[Trial, ...]:
        """Time what passed its gate, briefly and interleaved with `base`; the trials, with times.

        `extra["ratio"]` is its time over that of `base` in the same measurement, or its time in
        milliseconds where there is no base to compare with.
        """

    def race(self, study: Study, race: Race) -> tuple[Trial, ...]:
        """Time the finalists interleaved until it is known who wins; one trial each, in order.

        `extra` holds `gain`, `gain_low` and `gain_high` over the first, `aa_ratio` (the first
        against itself), `throttled`, and where there is an incumbent `gain_low_over_incumbent`
        and `incumbent` (1 for it).
        """

    def cancel(self) -> None:
        """End what runs, from another thread: the call that waits for it raises Ctrl-C."""

    def close(self) -> None:
        """End what was started; the runner is not used again."""
