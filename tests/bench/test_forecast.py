"""The predicted time of a CPU run."""

from __future__ import annotations

import pytest

from sage_plugin.bench import forecast
from sage_plugin.bench.compare import CPU_LIMITS
from sage_plugin.bench.forecast import PATIENCE_S, cpu_seconds
from sage_plugin.bench.suite import captured
from sage_plugin.measure.inputs import presets, self_attention
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import LinearShape
from tests.bench.folders import SHAPE, drawn, write


@pytest.fixture(autouse=True)
def _rate(monkeypatch):
    monkeypatch.setattr(forecast, "matmul_flops_per_s", lambda: 1e11)


def test_presets_take_longer_than_anyone_waits():
    cases = [drawn(shape) for shape in presets().values()]
    assert cpu_seconds(cases, [("sage", "auto")]) > 10 * PATIENCE_S


def test_small_inputs_take_their_samples_and_no_more():
    cases = [drawn(self_attention(1, 2, 64, 32))]
    assert cpu_seconds(cases, [("sage", "auto")]) < CPU_LIMITS.budget_s


def test_each_kernel_and_each_input_adds_to_it():
    cases = [drawn(self_attention(1, 8, 8192, 128))]
    one = cpu_seconds(cases, [("sage", "auto")])
    two = cpu_seconds(cases, [("sage", "auto"), ("fav2", "auto")])
    assert one < two
    assert cpu_seconds(2 * cases, [("sage", "auto")]) == pytest.approx(2 * one)


def test_a_capture_is_predicted_by_its_saved_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "matmul_flops_per_s", lambda: 1e3)
    whole = captured(write(tmp_path / "whole", SHAPE)).cases
    part = captured(write(tmp_path / "part", SHAPE, heads=(0,))).cases
    seconds = [cpu_seconds(c, [("sdpa", "auto")]) for c in (whole, part)]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.01)


def test_the_weights_of_a_mixture_take_their_time():
    one, many = (
        ReplayInputs(LinearShape(64, 2048, 1536, "bfloat16", groups=groups)) for groups in (1, 128)
    )
    kernels = [("int8_row", "auto"), ("fp8_row", "auto")]
    assert cpu_seconds([one], kernels) < 10
    assert cpu_seconds([many], kernels) > PATIENCE_S


def test_the_interpreter_is_known_to_be_slow():
    cases = [drawn(self_attention(1, 2, 256, 64))]
    assert cpu_seconds(cases, [("sage", "portable")]) > cpu_seconds(cases, [("sage", "emulation")])


def test_the_rate_is_of_the_kind_of_cpu_and_its_threads_and_never_measured(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    rates = {}
    for kind in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda kind=kind: kind)
        rates[kind] = forecast.matmul_flops_per_s()
    assert rates["AVX512"] > rates["AVX2"] > rates["DEFAULT"] > 1e10
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert 2 * forecast.matmul_flops_per_s() == rates["DEFAULT"]
