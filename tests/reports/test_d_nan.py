"""Section D: what turned into NaN or black images."""

from __future__ import annotations

import json

import pytest
import torch

import sage_plugin
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, launch, relative_l1
from tests.reports.machine import allowed

kernels = pytest.mark.parametrize("kernel", EMULATED)
quantized = pytest.mark.parametrize("kernel", QUANTIZED)


def shape_of(machine):
    return machine.pick(Shape(1, 1, 1, 16, 64, 32), Shape(1, 4, 2, 256, 512, 64))


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
