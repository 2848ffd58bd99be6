"""A linear as tools replay it: judged block by block of rows, split in two parts, costed."""

from __future__ import annotations

import pytest
import torch

from sage_plugin import device
from sage_plugin.accuracy.gate import failures
from sage_plugin.errors import UnknownKernelError, UsageError
from sage_plugin.families import describe, family
from sage_plugin.families.linear import cost
from sage_plugin.families.linear.replay import drawn
from sage_plugin.kernels.contract import Decision
from sage_plugin.measure.inputs import DISTRIBUTIONS
from sage_plugin.schema import LinearShape

CPU = device.facts("cpu")
LINEAR = family("linear")
SHAPE = LinearShape(64, 128, 96, "bfloat16", bias=True)
KERNELS = ("bf16", "fp8_row", "fp8_tensor", "int8_row")


def decided(kernel: str) -> Decision:
    return LINEAR.decide(SHAPE, CPU, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_kernel_passes_its_gate_on_every_distribution(kernel: str, distribution: str) -> None:
    call = drawn(SHAPE, "cpu", 3, distribution)
    errors = call.errors(decided(kernel), None)
    assert failures(LINEAR.gate_for(kernel), errors) == []
    if kernel != "bf16":
        assert errors.rel_l1 > 0.004


def test_a_wrong_output_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    call = drawn(SHAPE, "cpu")
    exact = call.exact()
    wrong = drawn(SHAPE, "cpu", 1)
    monkeypatch.setattr(type(call), "_computed", lambda self, *_: torch.zeros(64, 96) + wrong.bias)
    errors = call.errors(decided("fp8_row"), None)
    assert exact.out.shape == (1, 8, 8, 96)
    assert failures(LINEAR.gate_for("fp8_row"), errors)


def test_the_worst_block_of_rows_is_told() -> None:
    call = drawn(SHAPE, "cpu")
    call.x[8:16, :1] *= 60.0
    errors = call.errors(decided("int8_row"), None)
    assert errors.worst_head_rel_l1 > 2 * errors.rel_l1 * 0.9


def test_the_exact_rows_are_those_of_fp64() -> None:
    call = drawn(LinearShape(10, 16, 8, "float32", bias=True), "cpu")
    exact = call.exact()
    out = call.x.double() @ call.weight.double().t() + call.bias.double()
    torch.testing.assert_close(exact.out.view(10, 8), out.float())
    torch.testing.assert_close(exact.mean[0, 0, 0], out.mean(0).float())


def test_a_call_in_its_two_parts() -> None:
    call = drawn(SHAPE, "cpu")
    parts = call.split(decided("fp8_row"), None, CPU)
    assert parts.quantizes
    assert torch.equal(parts.whole(), parts.alone())
    assert parts.moved_bytes == 64 * (128 + 4) + 96 * (128 + 4) + 2 * 64 * 96
    plain = call.split(decided("bf16"), None, CPU)
    assert not plain.quantizes
    assert plain.moved_bytes == cost.moved_bytes(SHAPE)


def test_what_is_timed_repeats_what_was_judged() -> None:
    call = drawn(SHAPE, "cpu").full_size(LinearShape(100, 128, 96, "bfloat16", bias=True))
    assert torch.equal(call.x[64:], call.x[:36])
    assert call.flops() == 2 * 100 * 128 * 96


def test_names() -> None:
    assert describe(SHAPE) == "64x128->96 bf16 bias"
    assert LINEAR.parse_kernel("bf16:host") == ("bf16", "auto")
    assert LINEAR.kernels_of(CPU) == ("bf16", "fp8_tensor", "fp8_row", "int8_row")
    for wrong in ("sage", "fp8_row:hopper", "bf16:torch"):
        with pytest.raises(UnknownKernelError, match="choose one of"):
            LINEAR.parse_kernel(wrong)
    with pytest.raises(UsageError, match="allowed are normal"):
        drawn(SHAPE, "cpu", 0, "even")
