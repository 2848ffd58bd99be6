"""Linears of the real models: gates on a call of each, and SmolLM2's perplexity in 8 bits."""

from __future__ import annotations

import functools

import pytest

from sage_plugin import device
from sage_plugin.accuracy.gate import failures
from sage_plugin.families.linear.entry import decide
from sage_plugin.families.linear.gates import gate_for
from tests.real import captured, inputs, linears, outputs, weights

if weights.missing():
    pytest.skip(weights.missing(), allow_module_level=True)

CPU = device.facts("cpu")


@functools.cache
def recorded(model):
    return linears.recorded(model)


@pytest.mark.parametrize("model", captured.SETS)
def test_every_linear_is_recorded_once_with_its_weight(model):
    found = recorded(model)
    assert len(found) == linears.LINEARS[model] == len({one.layer for one in found})
    for one in found:
        assert one.call.x.shape == (linears.ROWS, one.call.shape.in_features)
        assert one.call.errors(decide(one.call.shape, CPU, kernel="bf16"), None).rel_l1 < 1e-5


@pytest.mark.parametrize("kernel", linears.KERNELS)
@pytest.mark.parametrize("model", captured.SETS)
def test_every_linear_keeps_the_gate(model, kernel):
    for one in recorded(model):
        errors = one.call.errors(decide(one.call.shape, CPU, kernel=kernel), None)
        assert failures(gate_for(kernel), errors) == [], one.layer
        assert errors.rel_l1 > 1e-3, one.layer  # it did run in 8 bits


@functools.cache
def smollm2():
    return captured.load("smollm2")


def test_rotated_channels_cost_smollm2_next_to_nothing_in_int8():
    """Single channels that stick out make the most of the 2.8 % that INT8 adds to it."""
    network, tokenizer = smollm2()
    with linears.on_kernel(network, "int8_row", rotation=256):
        values = captured.forward("smollm2", network, tokenizer)
    found = linears.perplexity(tokenizer, values, inputs.TOKENS)
    unpatched = outputs.output("smollm2", network, tokenizer, "sdpa").perplexity
    assert found == pytest.approx(unpatched, rel=0.005)


@pytest.mark.parametrize(("kernel", "most"), linears.PERPLEXITY.items())
def test_smollm2_reads_the_text_in_8_bits(kernel, most):
    network, tokenizer = smollm2()
    with linears.on_kernel(network, kernel) as count:
        values = captured.forward("smollm2", network, tokenizer)
    assert count == linears.LINEARS["smollm2"]
    found = linears.perplexity(tokenizer, values, inputs.TOKENS)
    unpatched = outputs.output("smollm2", network, tokenizer, "sdpa").perplexity
    assert unpatched * 1.001 < found < unpatched * most
