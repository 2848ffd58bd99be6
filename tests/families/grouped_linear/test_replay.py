"""Grouped linears as tools replay them: exact rows, errors, parts, routing, gates, names."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin import device
from sage_plugin.accuracy.gate import failures
from sage_plugin.errors import UnknownKernelError, UsageError
from sage_plugin.families import describe, family
from sage_plugin.families.grouped_linear.routing import drawn_sizes, sampled_sizes
from sage_plugin.kernels.contract import Decision
from sage_plugin.schema import LinearKey, LinearShape
from tests.kernels.grouped_linear.cases import exact as defined

GROUPED = family("grouped_linear")
CPU = device.facts("cpu")
SHAPE = LinearShape(96, 64, 48, "bfloat16", bias=True, groups=8)


@pytest.mark.parametrize("distribution", ["normal", "skewed"])
def test_exact_rows_are_those_of_the_definition(distribution: str) -> None:
    replay = GROUPED.drawn(SHAPE, "cpu", 0, distribution)
    exact = replay.exact(torch.arange(12))  # all rows of each of 8 blocks
    whole = defined(replay.x, replay.weight, replay.group_sizes, replay.bias)
    torch.testing.assert_close(exact.out[0].flatten(0, 1), whole.float())


@pytest.mark.parametrize("kernel", ["bf16", "fp8_row", "int8_row"])
def test_errors_pass_the_gate_and_parts_agree(kernel: str) -> None:
    replay = GROUPED.drawn(SHAPE, "cpu", 0, "skewed")
    decision = GROUPED.decide(SHAPE, CPU, kernel=kernel)
    errors = replay.errors(decision, None)
    assert not failures(GROUPED.gate_for(kernel), errors)
    assert (errors.rel_l1 > 0.003) == (kernel != "bf16")
    parts = replay.split(decision, None, CPU)
    assert torch.equal(parts.whole(), parts.alone())
    assert parts.quantizes == (kernel != "bf16")


def test_the_baseline_is_torchs_own_product() -> None:
    replay = GROUPED.drawn(dataclasses.replace(SHAPE, bias=False), "cpu")
    expected = defined(replay.x, replay.weight, replay.group_sizes)
    torch.testing.assert_close(replay.whole()().float(), expected.float(), rtol=0.01, atol=0.01)
    host = Decision("bf16", "host")
    assert replay.errors(host, None).rel_l1 < 1e-4


def test_a_routing_is_even_or_skewed_and_has_all_rows() -> None:
    assert drawn_sizes(10, 4, "normal").tolist() == [3, 3, 2, 2]
    skewed = drawn_sizes(4096, 64, "skewed", 1)
    assert skewed.sum() == 4096
    assert skewed.max() > 8 * 4096 // 64
    assert skewed.median() < 4096 // 64
    assert torch.equal(skewed, drawn_sizes(4096, 64, "skewed", 1))


def test_saved_rows_belong_to_the_groups_that_they_were_taken_of() -> None:
    sizes = torch.tensor([5, 0, 30, 1], dtype=torch.int32)
    # rows 1, 5, 9, ... of 36, by the middle of each ninth of them
    assert sampled_sizes(sizes, 9).tolist() == [1, 0, 8, 0]
    assert sampled_sizes(sizes, 36).tolist() == sizes.tolist()


def test_names() -> None:
    assert describe(SHAPE) == "96x64->48 in 8 groups bf16 bias"
    key = GROUPED.call_key(SHAPE, Decision("fp8_row", "triton"))
    assert key == LinearKey("fp8_row", "triton", 64, 48, "bfloat16", 96, 8)
    assert GROUPED.shape_of(key) == dataclasses.replace(SHAPE, bias=False)
    assert GROUPED.lines(key).splitlines()[1] == "96 rows, 8 groups"
    assert (key.family, dataclasses.replace(key, groups=0).family) == ("grouped_linear", "linear")
    assert GROUPED.parse_kernel("bf16:torch") == ("bf16", "torch")
    assert GROUPED.kernels_of(CPU) == ("bf16", "fp8_row", "int8_row")
    with pytest.raises(UnknownKernelError, match="choose one of"):
        GROUPED.parse_kernel("fp8_tensor")
    with pytest.raises(UsageError, match="allowed are normal"):
        GROUPED.drawn(SHAPE, "cpu", 0, "even")
