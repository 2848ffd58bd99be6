"""Which option each cell gets: the most milliseconds within an error, or least error in a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sage_plugin.errors import TuningError
from sage_plugin.plugin.policy.rules import HOST
from sage_plugin.tune.policy.estimates import CellEstimates, Estimate
from sage_plugin.tune.policy.knapsack import Alternative, Solution, solve
from sage_plugin.tune.policy.rules import Chosen

FRONT_POINTS = 12
FRONT_GRID = 4000
LAST_BITS = 1 + 1e-9
"""What was asked for is met where only the last bits of a sum say that it is not."""


@dataclass(frozen=True, slots=True)
class PolicyProblem:
    """The cells of a run and what they count.

    Attributes:
        cells: the cells and what may run in each.
        weights: how much the error of each cell counts, 1 on average.
        total_calls: attention calls of the run; those outside of the cells have no error.
        max_layer_error: greatest error of one call.
    """

    cells: tuple[CellEstimates, ...]
    weights: tuple[float, ...]
    total_calls: float
    max_layer_error: float

    def shares(self, number: int) -> list[tuple[Estimate, float]]:
        """What may run in a cell, each with its part of the run's mean error."""
        one = self.cells[number]
        factor = self.weights[number] * one.cell.weight / self.total_calls
        return [(e, factor * e.error) for e in one.estimates if e.error <= self.max_layer_error]

    def plain_error(self, picks: Sequence[Estimate]) -> float:
        """Mean error of one estimate a cell over all calls of the run, without weights."""
        return math.fsum(
            one.cell.weight * pick.error / self.total_calls
            for one, pick in zip(self.cells, picks, strict=True)
        )

    def single(self, label: str) -> tuple[float, float]:
        """Milliseconds and plain mean error of one option everywhere, whatever its error.

        Cells where it may not run stay with the host's attention.
        """
        picks = [one.of(label) for one in self.cells]
        return math.fsum(pick.ms for pick in picks), self.plain_error(picks)

    @property
    def host_ms(self) -> float:
        """Milliseconds of the run's attention on the host's."""
        return self.single(HOST)[0]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What was chosen.

    Attributes:
        chosen: one a cell.
        ms: of all cells in one run.
        error: mean over all calls of the run, weighted.
        plain_error: likewise without weights.
        slack: what no other choice can be better by: milliseconds, or error where the time was
            given.
    """

    chosen: tuple[Chosen, ...]
    ms: float
    error: float
    plain_error: float
    slack: float


def most_saved(problem: PolicyProblem, max_error: float) -> Assignment:
    """The assignment that saves the most within a mean error.

    Raises:
        TuningError: nothing that saves time keeps within it.
    """
    groups = _saving_groups(problem)
    solution = solve(groups, max_error * LAST_BITS)
    assert solution is not None, "the host's attention has no error"
    assignment = _assignment(problem, solution)
    if all(one.pick.label == HOST for one in assignment.chosen):
        raise TuningError(_nothing(problem, groups, max_error))
    return assignment


def least_error(problem: PolicyProblem, max_ms: float) -> Assignment:
    """The assignment of least mean error whose attention takes at most so long a run.

    Raises:
        TuningError: the fastest one takes longer.
    """
    groups = [
        [Alternative(-share, estimate.ms) for estimate, share in problem.shares(number)]
        for number in range(len(problem.cells))
    ]
    solution = solve(groups, max_ms * LAST_BITS)
    if solution is None:
        fastest = math.fsum(min(a.weight for a in group) for group in groups)
        raise TuningError(
            f"--max-ms {max_ms:g}: the fastest choice takes {fastest:.3f} ms of attention a run "
            f"(the host's attention {problem.host_ms:.3f}) with no call over an error of "
            f"{problem.max_layer_error:g} (--max-layer-error)"
        )
    assignment = _assignment(problem, solution)
    if all(one.pick.label == HOST for one in assignment.chosen):
        raise TuningError(
            f"--max-ms {max_ms:g}: the host's attention itself takes {problem.host_ms:.3f} ms a "
            "run, so that no policy is needed"
        )
    return assignment


def front_of(problem: PolicyProblem) -> tuple[Assignment, ...]:
    """Assignments from no error to the most that is worth having, each saving more than before."""
    groups = _saving_groups(problem)
    greatest = math.fsum(max(group, key=lambda a: (a.value, -a.weight)).weight for group in groups)
    # Each group's weight is rounded up to the grid by less than a step of it.
    greatest *= 1 + len(groups) / FRONT_GRID
    found: list[Assignment] = []
    for number in range(FRONT_POINTS + 1):
        solution = solve(groups, greatest * (number / FRONT_POINTS) ** 2, grid=FRONT_GRID)
        assert solution is not None, "the host's attention has no error"
        one = _assignment(problem, solution)
        if not found or one.ms < found[-1].ms:
            found.append(one)
    return tuple(found)


def _saving_groups(problem: PolicyProblem) -> list[list[Alternative]]:
    return [
        [Alternative(one.estimates[0].ms - e.ms, share) for e, share in problem.shares(number)]
        for number, one in enumerate(problem.cells)
    ]


def _assignment(problem: PolicyProblem, solution: Solution) -> Assignment:
    shares = [problem.shares(i)[pick] for i, pick in enumerate(solution.picks)]
    return Assignment(
        tuple(Chosen(c, e) for c, (e, _) in zip(problem.cells, shares, strict=True)),
        ms=math.fsum(estimate.ms for estimate, _ in shares),
        error=math.fsum(share for _, share in shares),
        plain_error=problem.plain_error([estimate for estimate, _ in shares]),
        slack=solution.bound - solution.value,
    )


def _nothing(
    problem: PolicyProblem, groups: Sequence[Sequence[Alternative]], max_error: float
) -> str:
    """Why the host's attention is left everywhere."""
    worth = [a.weight for group in groups for a in group if a.value > 0]
    if worth:
        return (
            f"--max-error {max_error:g}: nothing that saves time has so little error; the least "
            f"that does has {min(worth):.2g}"
        )
    slower = all(
        len(one.estimates) > 1 and all(e.ms >= one.estimates[0].ms for e in one.estimates[1:])
        for one in problem.cells
    )
    why = (
        "no kernel is faster here than the host's attention"
        if slower
        else f"no kernel keeps every call within an error of {problem.max_layer_error:g} "
        "(--max-layer-error), passes its accuracy gate and is faster than the host's attention"
    )
    return f"there is nothing to choose: {why}"
