"""The predicted time of a CPU run."""

from __future__ import annotations

import pytest

from sage_plugin.bench.compare import CPU_LIMITS
from sage_plugin.bench.forecast import PATIENCE_S, cpu_seconds, matmul_flops_per_s
from sage_plugin.bench.suite import captured
from sage_plugin.measure.inputs import presets, self_attention
from tests.bench.folders import SHAPE, drawn, write

RATE = 1e11


def test_presets_take_longer_than_anyone_waits():
    cases = [drawn(shape) for shape in presets().values()]
    assert cpu_seconds(cases, [("sage", "auto")], flops_per_s=RATE) > 10 * PATIENCE_S


def test_small_inputs_take_their_samples_and_no_more():
    cases = [drawn(self_attention(1, 2, 64, 32))]
    assert cpu_seconds(cases, [("sage", "auto")], flops_per_s=RATE) < CPU_LIMITS.budget_s


def test_each_kernel_and_each_input_adds_to_it():
    cases = [drawn(self_attention(1, 8, 8192, 128))]
    one = cpu_seconds(cases, [("sage", "auto")], flops_per_s=RATE)
    two = cpu_seconds(cases, [("sage", "auto"), ("fav2", "auto")], flops_per_s=RATE)
    assert one < two
    assert cpu_seconds(2 * cases, [("sage", "auto")], flops_per_s=RATE) == pytest.approx(2 * one)


def test_a_capture_is_predicted_by_its_saved_heads(tmp_path):
    whole = captured(write(tmp_path / "whole", SHAPE)).cases
    part = captured(write(tmp_path / "part", SHAPE, heads=(0,))).cases
    seconds = [cpu_seconds(c, [("sdpa", "auto")], flops_per_s=1e3) for c in (whole, part)]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.01)


def test_the_interpreter_is_known_to_be_slow():
    cases = [drawn(self_attention(1, 2, 256, 64))]
    assert cpu_seconds(cases, [("sage", "portable")], flops_per_s=RATE) > cpu_seconds(
        cases, [("sage", "emulation")], flops_per_s=RATE
    )


def test_the_machine_multiplies_at_all():
    assert matmul_flops_per_s() > 1e8
