"""`results.json` of a search: every cell with what was estimated there and what was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.tune.policy.choice import Assignment, PolicyProblem


def write(path: Path, problem: PolicyProblem, assignment: Assignment) -> None:
    """Replace the file in one step.

    Raises:
        OutputError: it cannot be written.
    """
    files.write_json(
        path,
        {
            "schema_version": 1,
            "total_calls": problem.total_calls,
            "max_layer_error": problem.max_layer_error,
            "ms": assignment.ms,
            "error": assignment.plain_error,
            "weighted_error": assignment.error,
            "slack": assignment.slack,
            "cells": [
                _cell(problem, number, one.pick.label)
                for number, one in enumerate(assignment.chosen)
            ],
        },
    )


def _cell(problem: PolicyProblem, number: int, chosen: str) -> dict[str, Any]:
    one = problem.cells[number]
    return {
        "layer": one.cell.layer,
        "steps": one.cell.band,
        "calls": one.cell.weight,
        "weight": problem.weights[number],
        "captured": bool(one.cell.records),
        "chosen": chosen,
        "estimates": {e.label: {"error": e.error, "ms": e.ms} for e in one.estimates},
    }
