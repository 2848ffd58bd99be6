"""Limits, the sentences on what breaks them, and the worst of several captures."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sage_plugin.accuracy.gate import Gate, failures, gate_for, worst
from sage_plugin.accuracy.metrics import compare
from sage_plugin.errors import UnknownKernelError, UsageError
from sage_plugin.schema import KERNELS, ErrorMetrics

GOOD = ErrorMetrics(
    rel_l1=0.001,
    cosine=0.99999,
    rmse=0.001,
    max_abs=0.01,
    row_cosine_p10=0.9999,
    worst_head_rel_l1=0.002,
    worst_head_cosine=0.99995,
    gain=1.0,
    centred_rel_l1=0.01,
    rounding_floor=0.01,
    bad_values=0,
    worst_head_row_cosine_p10=0.9999,
)


def changed(**fields):
    return dataclasses.replace(GOOD, **fields)


@pytest.mark.parametrize("kernel", [*KERNELS, "qk_int8"])
def test_every_kernel_has_a_gate_that_a_good_run_passes(kernel):
    assert failures(gate_for(kernel), GOOD) == []


def test_start_limits():
    assert gate_for("fav2") == gate_for("sdpa") == gate_for("torch") == Gate(0.9999, None, 0.02)
    assert gate_for("sage") == Gate(0.999, 0.99, 0.05)
    assert gate_for("fav3_sage") == gate_for("fav3_fp8") == Gate(0.998, 0.98, 0.15)


@pytest.mark.parametrize("kernel", ["torch", "sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8"])
@pytest.mark.parametrize("factor", [0.1, 0.8, 1.25])
def test_an_output_of_the_wrong_size_fails_every_gate(kernel, factor):
    exact = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    assert failures(gate_for(kernel), compare(exact, exact)) == []
    (sentence,) = failures(gate_for(kernel), compare(factor * exact, exact))
    assert sentence.startswith("relative L1 of the worst head")


def test_unknown_kernel():
    with pytest.raises(UnknownKernelError, match="sagge"):
        gate_for("sagge")


@pytest.mark.parametrize(
    ("kernel", "fields", "sentence"),
    [
        (
            "fav2",
            {"worst_head_cosine": 0.9998},
            "cosine of the worst head is 0.999800, at least 0.99",
        ),
        (
            "sage",
            {"worst_head_rel_l1": 0.06},
            "relative L1 of the worst head is 0.0600, at most 0.05",
        ),
        (
            "sage",
            {"row_cosine_p10": 0.98},
            "row cosine is 0.980000 in the worst head, at least 0.99",
        ),
        ("fav3_sage", {"worst_head_row_cosine_p10": 0.9}, "row cosine is 0.900000"),
        ("torch", {"bad_values": 1}, "1 NaN or infinite values"),
        (
            "sdpa",
            {"suspect": "its output is constant"},
            "not to be trusted: its output is constant",
        ),
        ("sage", {"cosine": math.nan}, "cosine of the worst head is nan"),
    ],
)
def test_each_limit_names_value_and_limit(kernel, fields, sentence):
    broken = failures(gate_for(kernel), changed(**fields))
    assert len(broken) == 1
    assert sentence in broken[0]


def test_int8_may_not_exceed_what_fp8_may():
    metrics = changed(worst_head_rel_l1=0.06)
    assert failures(gate_for("sage"), metrics)
    assert not failures(gate_for("fav3_sage"), metrics)


def test_worst_keeps_the_worst_of_each_metric():
    other = changed(rel_l1=0.5, cosine=0.9, gain=0.7, bad_values=2, suspect="x", row_cosine_p10=1.0)
    merged = worst([GOOD, other, changed(suspect="x")])
    assert merged.rel_l1 == 0.5
    assert merged.cosine == 0.9
    assert merged.gain == 0.7
    assert merged.bad_values == 2
    assert merged.suspect == "x"
    assert merged.row_cosine_p10 == 0.9999


def test_worst_of_nothing_is_refused():
    with pytest.raises(UsageError, match="no metrics"):
        worst([])


def test_gate_is_frozen_and_survives_json():
    gate = gate_for("sage")
    assert Gate.from_json(gate.to_json()) == gate
    with pytest.raises(dataclasses.FrozenInstanceError):
        gate.min_cosine = 0.0
