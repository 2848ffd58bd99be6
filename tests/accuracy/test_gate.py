"""Limits, the sentences on what breaks them, and the worst of several captures."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from sage_plugin.accuracy.gate import Gate, failures, worst
from sage_plugin.accuracy.metrics import compare
from sage_plugin.errors import UnknownKernelError, UsageError
from sage_plugin.families.attention.gates import gate_for
from sage_plugin.schema import KERNELS, ErrorMetrics, RegistryFile
from tests.real.rule import gate_of

ROOT = Path(__file__).resolve().parents[2]
MEASURED = json.loads((ROOT / "benchmarks/results/gates.json").read_text(encoding="utf-8"))
SHIPPED = sorted((ROOT / "configs").glob("*/attention.json"))

GOOD = ErrorMetrics(
    rel_l1=0.001,
    cosine=0.999999,
    rmse=0.001,
    max_abs=0.01,
    row_cosine_p10=0.999999,
    worst_head_rel_l1=0.002,
    worst_head_cosine=0.999999,
    gain=1.0,
    centred_rel_l1=0.002,
    rounding_floor=0.002,
    bad_values=0,
    worst_head_row_cosine_p10=0.999999,
)


def changed(**fields):
    return dataclasses.replace(GOOD, **fields)


@pytest.mark.parametrize("kernel", [*KERNELS, "qk_int8"])
def test_every_kernel_has_a_gate_that_a_good_run_passes(kernel):
    assert failures(gate_for(kernel), GOOD) == []


def measured_worst(*kernels, models):
    """The worst errors in the measurements that the gates were derived from."""
    rows = [row for row in MEASURED["captures"] if row["kernel"] in kernels]
    return worst([ErrorMetrics.from_json(r["errors"]) for r in rows if r["model"] in models])


REAL = ("smollm2", "minilm", "whisper", "demo")
IN_RULE = (*REAL, "random normal", "random biased")


@pytest.mark.parametrize("kernel", ["fav2", "sage", "fav3_sage", "fav3_fp8"])
def test_gates_follow_from_the_measurements_by_the_rule(kernel):
    assert gate_for(kernel) == gate_of(measured_worst(kernel, models=IN_RULE))
    assert failures(gate_for(kernel), measured_worst(kernel, models=REAL)) == []


@pytest.mark.parametrize("kernel", ["torch", "sdpa"])
def test_the_hosts_attention_has_a_wider_gate_and_no_centered_limit(kernel):
    base = measured_worst("sdpa", "fav2", models=IN_RULE)
    assert gate_for(kernel) == gate_of(base, host=True)
    assert gate_for(kernel).max_centred_rel_l1 is None


def test_every_set_was_measured_in_full():
    layers = {model: set() for model in REAL}
    for row in MEASURED["captures"]:
        if row["kernel"] == "sage" and row["model"] in layers:
            layers[row["model"]].add(row["layer"])
    assert {model: len(found) for model, found in layers.items()} == {
        "smollm2": 30,
        "minilm": 6,
        "whisper": 4,
        "demo": 8,
    }


def test_rule_rounds_away_from_the_measurement():
    gate = gate_of(changed(worst_head_rel_l1=0.0401, cosine=0.99, centred_rel_l1=0.0401))
    assert gate.max_worst_head_rel_l1 == gate.max_centred_rel_l1 == 0.051
    assert gate.min_cosine == pytest.approx(1 - 0.016)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_the_evidence_of_every_shipped_config_passes(path):
    entries = RegistryFile.from_json(json.loads(path.read_text(encoding="utf-8"))).entries
    assert entries
    for entry in entries:
        assert failures(gate_for(entry.key.kernel), entry.evidence.errors) == [], entry.key


@pytest.mark.parametrize("kernel", ["torch", "sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8"])
@pytest.mark.parametrize("factor", [0.1, 0.8, 1.25])
def test_an_output_of_the_wrong_size_fails_every_gate(kernel, factor):
    exact = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    assert failures(gate_for(kernel), compare(exact, exact)) == []
    sentences = failures(gate_for(kernel), compare(factor * exact, exact))
    assert sentences
    assert all(sentence.startswith("relative L1 of the ") for sentence in sentences)


def test_a_bias_of_v_hides_nothing():
    """A uniform softmax is far off, yet close to the output where V has a large common mean."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1, 2, 16, 8, generator=generator)
    mean = torch.full((1, 2, 1, 8), 1000.0)
    errors = compare(mean.expand_as(exact), exact + mean, v_mean=mean)
    assert errors.rel_l1 < 0.001
    for kernel in ("fav2", "sage", "fav3_sage", "fav3_fp8"):
        (sentence,) = failures(gate_for(kernel), errors)
        assert sentence.startswith("relative L1 of the centred output is 1.0")


def test_unknown_kernel():
    with pytest.raises(UnknownKernelError, match="sagge"):
        gate_for("sagge")


@pytest.mark.parametrize(
    ("kernel", "fields", "sentence"),
    [
        (
            "fav2",
            {"worst_head_cosine": 0.9998},
            "cosine of the worst head is 0.9998000, at least 0.9999979",
        ),
        (
            "sage",
            {"worst_head_rel_l1": 0.06},
            "relative L1 of the worst head is 0.0600, at most 0.052",
        ),
        (
            "sage",
            {"row_cosine_p10": 0.98},
            "row cosine is 0.9800000 in the worst head, at least 0.9933",
        ),
        ("fav3_sage", {"worst_head_row_cosine_p10": 0.9}, "row cosine is 0.9000000"),
        (
            "sage",
            {"centred_rel_l1": 0.035},
            "relative L1 of the centred output is 0.0350, at most 0.034",
        ),
        ("fav3_sage", {"centred_rel_l1": math.nan}, "centred output is nan"),
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
    assert merged.row_cosine_p10 == 0.999999


def test_worst_of_nothing_is_refused():
    with pytest.raises(UsageError, match="no metrics"):
        worst([])


def test_gate_is_frozen_and_survives_json():
    gate = gate_for("sage")
    assert Gate.from_json(gate.to_json()) == gate
    with pytest.raises(dataclasses.FrozenInstanceError):
        gate.min_cosine = 0.0
