"""Which option each cell gets: the most milliseconds within an error, or least error in a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sage_plugin.errors import TuningError
from sage_plugin.plugin.policy.rules import BASELINES, HOST
from sage_plugin.tune.policy.grid import Estimate, PolicyCell
from sage_plugin.tune.policy.knapsack import Alternative, solve

FRONT_POINTS = 12
FRONT_GRID = 4000
LAST_BITS = 1 + 1e-9
"""What was asked for is met if only the last bits of a sum say that it is not."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What was chosen.

    Attributes:
        picks: an estimate per cell.
        ms: of all cells in one run.
        error: mean over all calls of the run, weighted by sensitivity.
        plain_error: the same without weights.
        slack: what no other choice can be better by: milliseconds, or error if the time was given.
    """

    picks: tuple[Estimate, ...]
    ms: float
    error: float
    plain_error: float
    slack: float


@dataclass(frozen=True, slots=True)
class PolicyProblem:
    """The cells of a run and what they count.

    Attributes:
        cells: the cells with their estimates.
        total_calls: calls of the run; those outside of the cells have no error.
        max_layer_error: greatest error of one call.
        words: what the calls are.
    """

    cells: tuple[PolicyCell, ...]
    total_calls: float
    max_layer_error: float
    words: str = "attention"

    def allowed(self, cell: PolicyCell) -> list[Estimate]:
        """List what may run in a cell."""
        return [one for one in cell.estimates if one.error <= self.max_layer_error]

    def share(self, cell: PolicyCell, estimate: Estimate, *, weighted: bool = True) -> float:
        """Return the part that an estimate adds to the run's mean error."""
        weight = cell.weight if weighted else 1.0
        return weight * cell.calls_per_run * estimate.error / self.total_calls

    def single(self, label: str) -> tuple[float, float]:
        """Return milliseconds and plain mean error of one option everywhere, whatever its error.

        Cells where it may not run stay with the baseline.
        """
        one = self.assignment([cell.of(label) for cell in self.cells])
        return one.ms, one.plain_error

    def assignment(self, picks: Sequence[Estimate], slack: float = 0.0) -> Assignment:
        """Sum up an estimate per cell."""
        pairs = list(zip(self.cells, picks, strict=True))
        return Assignment(
            tuple(picks),
            ms=math.fsum(pick.ms for pick in picks),
            error=math.fsum(self.share(cell, pick) for cell, pick in pairs),
            plain_error=math.fsum(self.share(cell, pick, weighted=False) for cell, pick in pairs),
            slack=slack,
        )

    @property
    def baseline_ms(self) -> float:
        """Milliseconds of the run's calls by the baseline."""
        return self.single(HOST)[0]

    def most_saved(self, max_error: float) -> Assignment:
        """Return the assignment that saves the most within a mean error.

        Raises:
            TuningError: nothing that saves time keeps within it.
        """
        found = self._saving(self._savings(), max_error * LAST_BITS)
        if all(pick.label in BASELINES.values() for pick in found.picks):
            raise TuningError(self._why_nothing(max_error))
        return found

    def least_error(self, max_ms: float) -> Assignment:
        """Return the assignment of least mean error whose calls take so long a run at most.

        Raises:
            TuningError: the fastest one takes longer.
        """
        groups = [[(-self.share(c, e), e.ms) for e in self.allowed(c)] for c in self.cells]
        found = self._solved(groups, max_ms * LAST_BITS)
        if found is None:
            fastest = math.fsum(min(ms for _, ms in group) for group in groups)
            raise TuningError(
                f"--max-ms {max_ms:g}: the fastest choice takes {fastest:.3f} ms of {self.words} "
                f"a run (the host's own {self.baseline_ms:.3f}) with no call over an error of "
                f"{self.max_layer_error:g} (--max-layer-error)"
            )
        if all(pick.label in BASELINES.values() for pick in found.picks):
            raise TuningError(
                f"--max-ms {max_ms:g}: the host's {self.words} itself takes {self.baseline_ms:.3f} "
                "ms a run, so that no policy is needed"
            )
        return found

    def front(self) -> tuple[Assignment, ...]:
        """List assignments from no error to the most worth having, each faster than before."""
        groups = self._savings()
        heaviest = math.fsum(max(group, key=lambda a: (a[0], -a[1]))[1] for group in groups)
        # Each group's weight is rounded up to the grid by less than a step of it.
        heaviest *= 1 + len(groups) / FRONT_GRID
        found: list[Assignment] = []
        for number in range(FRONT_POINTS + 1):
            one = self._saving(groups, heaviest * (number / FRONT_POINTS) ** 2, grid=FRONT_GRID)
            if not found or one.ms < found[-1].ms:
                found.append(one)
        return tuple(found)

    def to_json(self, assignment: Assignment) -> dict[str, Any]:
        """Return every cell with what was estimated there and what was chosen, for a file."""
        return {
            "schema_version": 1,
            "total_calls": self.total_calls,
            "max_layer_error": self.max_layer_error,
            "ms": assignment.ms,
            "error": assignment.plain_error,
            "weighted_error": assignment.error,
            "slack": assignment.slack,
            "cells": [
                {
                    "layer": cell.layer,
                    "steps": cell.steps,
                    "calls": cell.calls_per_run,
                    "weight": cell.weight,
                    "captured": bool(cell.records),
                    "chosen": pick.label,
                    "estimates": {e.label: {"error": e.error, "ms": e.ms} for e in cell.estimates},
                }
                for cell, pick in zip(self.cells, assignment.picks, strict=True)
            ],
        }

    def _savings(self) -> list[list[Alternative]]:
        """What each estimate saves and adds to the error, by cell."""
        return [
            [(cell.estimates[0].ms - e.ms, self.share(cell, e)) for e in self.allowed(cell)]
            for cell in self.cells
        ]

    def _saving(
        self, groups: Sequence[Sequence[Alternative]], room: float, grid: int | None = None
    ) -> Assignment:
        found = self._solved(groups, room, grid)
        assert found is not None, "the baseline has no error"
        return found

    def _solved(
        self, groups: Sequence[Sequence[Alternative]], room: float, grid: int | None = None
    ) -> Assignment | None:
        solution = solve(groups, room, grid=grid)
        if solution is None:
            return None
        numbers, bound = solution
        value = math.fsum(group[n][0] for group, n in zip(groups, numbers, strict=True))
        pairs = zip(self.cells, numbers, strict=True)
        return self.assignment([self.allowed(c)[n] for c, n in pairs], slack=bound - value)

    def _why_nothing(self, max_error: float) -> str:
        """Why the baseline is left everywhere."""
        worth = [weight for group in self._savings() for value, weight in group if value > 0]
        if worth:
            return (
                f"--max-error {max_error:g}: nothing that saves time has so little error; the "
                f"least that does has {min(worth):.2g}"
            )
        slower = all(
            cell.estimates[1:] and all(e.ms >= cell.estimates[0].ms for e in cell.estimates[1:])
            for cell in self.cells
        )
        if slower:
            why = f"no kernel is faster here than the host's {self.words}"
        else:
            why = (
                f"no kernel keeps every call within an error of {self.max_layer_error:g} "
                "(--max-layer-error), passes its accuracy gate and is faster than the host's "
                f"{self.words}"
            )
        return f"there is nothing to choose: {why}"
