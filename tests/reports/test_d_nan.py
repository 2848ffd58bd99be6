"""Section D: what turned into NaN or black images."""

from __future__ import annotations

import json
import math

import pytest
import torch

import sage_plugin
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, launch, relative_l1
from tests.reports.machine import allowed, assert_close, exact

kernels = pytest.mark.parametrize("kernel", EMULATED)
quantized = pytest.mark.parametrize("kernel", QUANTIZED)


def shape_of(machine):
    return machine.pick(Shape(1, 1, 1, 16, 64, 32), Shape(1, 4, 2, 256, 512, 64))


@kernels
@pytest.mark.parametrize("smooth_v", [False, True])
@pytest.mark.parametrize("value", [7e4, 1e5, 2000.0])
def test_report_46_values_and_sums_beyond_fp16(machine, kernel, smooth_v, value):
    """64 keys of 2000 sum to 128,000 under equal weights; bf16 holds what fp16 cannot."""
    q, k, v = machine.draw(shape_of(machine), torch.bfloat16)
    config = launch(64, 64, smooth_v=smooth_v)
    flat = torch.full_like(v, value)
    mixed = flat.clone()
    mixed[:, :, ::3, ::2] *= -0.5
    for values in (flat, mixed):
        for queries in machine.pick((q * 0,), (q * 0, q)):
            out = machine.attention(
                kernel, queries, k, values, launch=config, out_dtype=torch.float32
            )
            assert_close(kernel, out, exact(queries, k, values)[0], times=3, dtype=v.dtype)


@kernels
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-39])
def test_report_49_zero_and_tiny_inputs(machine, kernel, which, value):
    tensors = list(machine.draw(shape_of(machine), torch.bfloat16))
    tensors[which] = tensors[which].sign() * value
    assert tensors[which].abs().max() == torch.tensor(value).bfloat16()
    out = machine.attention(kernel, *tensors, out_dtype=torch.float32)
    expected = exact(*tensors)[0]
    assert out.isfinite().all()
    if which == 2:
        assert (out - expected).abs().max() <= value
    else:
        assert_close(kernel, out, expected, times=3, dtype=torch.bfloat16)


@kernels
@pytest.mark.parametrize("size", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_report_49_small_values_keep_their_digits(machine, kernel, size, smooth_v):
    """fp16 has none left under 6e-8; V that is given in a wider type has all of them."""
    q, k, v = machine.draw(shape_of(machine), torch.bfloat16)
    v = v * size
    config = launch(64, 64, smooth_v=smooth_v)
    out = machine.attention(kernel, q, k, v, launch=config, out_dtype=torch.float32)
    assert_close(kernel, out, exact(q, k, v)[0], times=3, dtype=v.dtype)


@kernels
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
@pytest.mark.parametrize("smooth", [False, True])
def test_report_49_a_block_of_zeros_among_others(machine, kernel, which, smooth):
    shape = machine.pick(Shape(1, 1, 1, 20, 130, 32), Shape(1, 4, 2, 256, 512, 64))
    tensors = machine.draw(shape)
    tensors[which][:, :, 64:128] = 0
    config = launch(64, 64, smooth_k=smooth, smooth_v=smooth)
    machine.checked(kernel, *tensors, launch=config, times=4)


@kernels
def test_report_51_products_beyond_fp16(machine, kernel):
    """Sums of 3e4 * 3e4 over the channels are far over fp16, whatever the scale makes of them."""
    q, k, v = machine.draw(shape_of(machine))
    q, k = (3e4 * x / x.abs().amax((2, 3), keepdim=True) for x in (q.float(), k.float()))
    q, k = q.half(), k.half()
    assert (
        q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    ).abs().max() > 1e8
    for scale in (1e-8, 3e-9):
        machine.checked(kernel, q, k, v, scale=scale, times=3)
    out, lse = machine.attention(kernel, q, k, v, return_lse=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert out.abs().max() <= 1.01 * v.abs().max()


@kernels
@pytest.mark.parametrize("sequence", ["one", "packed"])
def test_report_52_fifty_calls_with_every_part_are_equal_bit_for_bit(gpu, kernel, sequence):
    sinks = gpu.normal(4)
    parts = {"is_causal": True, "window": (300, -1), "softcap": 20.0, "sinks": sinks}
    if sequence == "one":
        q, k, v = gpu.draw(Shape(2, 4, 2, 400, 500, 128), torch.bfloat16)
        mask = gpu.normal(2, 4, 400, 500)

        def call():
            gpu.nan_memory()
            return gpu.attention(kernel, q, k, v, mask, return_lse=True, **parts)
    else:
        q, k, v = (gpu.normal(900, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
        ends = torch.tensor([0, 1, 400, 777, 900], dtype=torch.int32, device=gpu.device)

        def call():
            gpu.nan_memory()
            return sage_plugin.attention_varlen(
                q, k, v, ends, ends, 399, 399, kernel=kernel, return_lse=True, **parts
            )

    first = call()
    for _ in range(50):
        for mine, expected in zip(call(), first, strict=True):
            assert torch.equal(mine, expected)


@kernels
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_report_54_scores_a_hundred_times_the_cap(machine, kernel, softcap):
    q, k, v = machine.draw(shape_of(machine))
    machine.checked(kernel, q, k, v, softcap=softcap, times=4)
    q = q.float()
    k = k.float() - k.float().mean(2, keepdim=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[3] ** -0.5
    q = q * (100 * softcap / scores.abs().max())
    out, lse = machine.attention(
        kernel, q, k, v, softcap=softcap, return_lse=True, out_dtype=torch.float32
    )
    expected, expected_lse = exact(q, k, v, softcap=softcap)
    assert lse.isfinite().all()
    assert (lse - expected_lse).abs().max() < 0.1 * max(1.0, softcap)
    # The sign of a score near 0 decides between two weights: only a small cap keeps that near.
    assert_close(kernel, out, expected, times=3 if softcap < 1 else 20)


def test_report_55_kernel_variant_and_launch_are_chosen_by_call_and_by_environment(
    machine, monkeypatch
):
    q, k, v = machine.draw(shape_of(machine))
    config = launch(16, 32, smooth_k=False)
    by_call = {
        kernel: sage_plugin.attention(q, k, v, kernel=kernel, variant="portable", launch=config)
        for kernel in EMULATED
    }
    assert not torch.equal(by_call["sage"], by_call["fav3_fp8"])
    monkeypatch.setenv("SAGE_PLUGIN_VARIANT", "portable")
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", json.dumps(config.to_json()))
    for kernel, expected in by_call.items():
        monkeypatch.setenv("SAGE_PLUGIN_KERNEL", kernel)
        assert torch.equal(sage_plugin.attention(q, k, v), expected)
    monkeypatch.setenv("SAGE_PLUGIN_KERNEL", "sdpa")
    host = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert relative_l1(sage_plugin.attention(q, k, v), host) < 1e-3
    assert relative_l1(by_call["sage"], host) < allowed("sage", 4)


@quantized
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_report_46_what_is_not_finite_shows_and_stays_where_it_is_seen(machine, kernel, bad):
    q, k, v = machine.draw(shape_of(machine))
    clean = machine.attention(kernel, q, k, v, is_causal=True, out_dtype=torch.float32)
    at = k.shape[2] - 5
    for which in (k, v):
        kept = which[:, :, at, 3].clone()
        which[:, :, at, 3] = bad
        out = machine.attention(kernel, q, k, v, is_causal=True, out_dtype=torch.float32)
        which[:, :, at, 3] = kept
        assert out[:, :, -5:].isnan().all()
        assert_close(kernel, out[:, :, :-5], clean[:, :, :-5], times=2)
