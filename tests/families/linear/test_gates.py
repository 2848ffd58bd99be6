"""The gates of linears are those that the committed measurements give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sage_plugin.accuracy.gate import Gate
from sage_plugin.families.linear.gates import gate_for
from sage_plugin.schema import ErrorMetrics
from tests.real import rule

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results/linear_models.json"


@pytest.mark.parametrize("kernel", ["fp8_row", "fp8_tensor", "int8_row"])
def test_a_gate_follows_from_the_worst_errors_by_the_rule(kernel: str) -> None:
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))["gates"][kernel]
    worst = ErrorMetrics.from_json(measured["worst"])
    assert gate_for(kernel) == rule.gate_of(worst) == Gate.from_json(measured["gate"])
    assert measured["captures"] == 300
