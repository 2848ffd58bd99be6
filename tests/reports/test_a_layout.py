"""Section A: strides, memory orders and offsets beyond 32 bits."""

from __future__ import annotations

import inspect
import json
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sage_plugin
from sage_plugin.kernels.contract import AttentionParams, OutputForm
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, launch
from tests.matrix.definition import definition
from tests.reports.machine import assert_close
from tests.reports.plan import plan

BEYOND = 2**31
"""Elements from which on a 32-bit offset is negative."""
HALFWAY = 2**28
WIDE = 3 * 56 * 128
"""Row stride of Q, K and V in one buffer: 56 heads of 128 channels."""

kernels = pytest.mark.parametrize("kernel", EMULATED)


def far(machine, size, strides, dtype, *, first=0):
    """A view whose offsets pass 2^31, in the upper part of a buffer of NaN.

    An offset that wraps falls into the lower part: a wrong value, and no crash. In the interpreter
    pages that nobody writes cost nothing, and hold zeros.
    """
    span = sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    assert span > BEYOND
    buffer = torch.empty(BEYOND + span + 1024, dtype=dtype, device=machine.device)
    if machine.on_gpu:
        buffer.fill_(math.nan if dtype.is_floating_point else 0)
    return buffer.as_strided(size, strides, BEYOND + first)


# -- offsets ----------------------------------------------------------------------------------


@kernels
@pytest.mark.usefixtures("large_memory")
def test_report_1_rows_of_a_fused_buffer_beyond_32_bits(machine, kernel):
    seq, stride, dtype = machine.pick((10, HALFWAY, torch.float16), (1100, 2**21, torch.bfloat16))
    dim = 64
    fused = far(machine, (seq, 3 * dim), (stride, 1), dtype)
    fused.copy_(machine.normal(seq, 3 * dim))
    views = [fused[:, i * dim : (i + 1) * dim][None, None] for i in range(3)]
    assert (seq - 1) * views[1].stride(2) > BEYOND
    out = machine.attention(kernel, *views)
    copies = [x.contiguous() for x in views]
    assert torch.equal(out, machine.attention(kernel, *copies))
    assert_close(kernel, out, definition(*copies)[0], times=2, dtype=dtype)


@kernels
@pytest.mark.parametrize("seq", [99_866, 200_064])
@pytest.mark.usefixtures("large_memory")
def test_report_1_and_2_a_video_of_that_length(gpu, kernel, seq):
    """The spans of the reports: over the range of int32, and over that of uint32."""
    fused = torch.empty(seq * WIDE, dtype=torch.bfloat16, device=gpu.device).fill_(math.nan)
    rows = fused.as_strided((seq, 3, 128), (WIDE, 56 * 128, 1), 55 * 128)
    generator = torch.Generator(gpu.device).manual_seed(0)
    rows.copy_(torch.randn(seq, 3, 128, device=gpu.device, generator=generator))
    q, k, v = (x[None, :, None] for x in rows.unbind(1))
    assert (seq - 1) * k.stride(1) > (BEYOND if seq < 100_000 else 2 * BEYOND)
    q = q[:, -200:]
    out = gpu.attention(kernel, q, k, v, layout="bshd")
    copies = [x.contiguous() for x in (q, k, v)]
    del fused, rows, k, v
    assert torch.equal(out, gpu.attention(kernel, *copies, layout="bshd"))


@kernels
@pytest.mark.parametrize("form", ["rows", "keys"])
@pytest.mark.usefixtures("large_memory")
def test_report_2_masks_beyond_32_bits(machine, kernel, form):
    q, k, v = machine.draw(Shape(1, 1, 1, 10, 10, 32))
    size, strides = {
        "rows": ((1, 1, 10, 10), (0, 0, HALFWAY, 1)),
        "keys": ((1, 1, 1, 10), (0, 0, 0, HALFWAY)),
    }[form]
    mask = far(machine, size, strides, torch.bool)
    mask.copy_(machine.normal(*size) > 0)
    mask[..., 1] = True
    expected = machine.attention(kernel, q, k, v, mask.contiguous())
    assert torch.equal(machine.attention(kernel, q, k, v, mask), expected)
    assert_close(kernel, expected, definition(q, k, v, mask.contiguous())[0], times=3)


@kernels
@pytest.mark.usefixtures("large_memory")
def test_report_2_an_output_beyond_32_bits(machine, kernel, monkeypatch):
    q, k, v = machine.draw(Shape(1, 1, 1, 10, 10, 32))
    expected = machine.attention(kernel, q, k, v)
    made = []

    def spread(self, dtype):
        made.append(far(machine, self.shape, (0, 0, HALFWAY, 1), dtype))
        return made[0]

    monkeypatch.setattr(OutputForm, "empty", spread)
    prepared = sage_plugin.prepare(q, k, v, kernel=kernel, **machine.options())
    out = sage_plugin.launch(prepared)
    assert out is made[0]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_4_scratch_grows_with_the_length_and_not_with_its_square(
    monkeypatch, kernel, interpreter
):
    """A matrix of S x S / block entries would be 9.5 GB at that length, with strides over 2^31."""
    sizes = {}
    for seq in (73_774, 2 * 73_774):
        q = torch.empty(1, 56, seq, 128, dtype=torch.bfloat16, device="meta")
        tensors = plan(monkeypatch, kernel, q, q.clone(), q.clone()).tensors.values()
        sizes[seq] = sum(x.numel() * x.element_size() for x in tensors)
        for x in tensors:
            assert max(x.stride(), default=0) * x.element_size() < BEYOND
            assert x.numel() * x.element_size() <= 2.01 * q.numel()
        # Q, K, V, output; 8-bit Q and K, V of at most 16 bits; scales, less than a 16th of one.
        inputs_and_output, scratch = 4 * 2 * q.numel(), (2 + 2 + 0.125) * q.numel()
        assert sizes[seq] <= inputs_and_output + (0 if kernel == "fav2" else scratch) + 2**24
    assert sizes[2 * 73_774] < 2.01 * sizes[73_774]


@kernels
@pytest.mark.usefixtures("large_memory")
def test_report_7_more_than_2_to_31_elements_of_output_and_scratch(gpu, kernel):
    heads, seq, dim = 16, 2**21 + 200, 64
    q, k, v = gpu.draw(Shape(1, heads, heads, 128, 40, dim))
    rows = q.repeat(1, 1, 2, 1)[:, :, :200]
    long = rows[:, :, :1].expand(1, heads, seq, dim).clone()
    assert long.numel() > BEYOND
    long[:, :, -200:] = rows
    config = launch(64, 64, loads="pointer" if kernel == "fav2" else "descriptor")
    options = {"launch": config, "return_lse": True}
    out, lse = gpu.attention(kernel, long, k, v, **options)
    alone, alone_lse = gpu.attention(kernel, rows, k, v, **options)
    assert torch.equal(out[:, :, -200:], alone)
    assert torch.equal(lse[:, :, -200:], alone_lse)
    assert torch.equal(out[:, :, :1000], alone[:, :, :1].expand(1, heads, 1000, dim))
    assert torch.equal(out[:, :, 2**20], alone[:, :, 0])


# -- memory orders ----------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Notes every op that copies a tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "clone", "contiguous", "_to_copy", "cat", "stack", "reshape"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@kernels
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_report_5_an_unbound_qkv_buffer_is_read_in_place(machine, kernel, layout):
    seq, dim = machine.pick((40, 32), (700, 64))
    qkv = machine.normal(2, seq, 3, 2, dim, dtype=torch.bfloat16)
    views = qkv.unbind(2)
    if layout == "bhsd":
        views = [x.transpose(1, 2) for x in views]
    with Copies() as copies:
        out = machine.attention(kernel, *views, layout=layout)
    assert copies.names == []
    expected = machine.attention(kernel, *(x.contiguous() for x in views), layout=layout)
    assert torch.equal(out, expected)
    assert torch.equal(qkv, machine.normal(2, seq, 3, 2, dim, dtype=torch.bfloat16))


@kernels
def test_report_6_the_output_has_the_memory_order_of_q(machine, kernel):
    q, k, v = machine.draw(Shape(2, 3, 3, 20, 33, 32), layout="bshd")
    out = machine.attention(kernel, *(x.transpose(1, 2) for x in (q, k, v)))
    assert out.shape == (2, 3, 20, 32)
    assert out.transpose(1, 2).is_contiguous()
    plain = q.transpose(1, 2).contiguous()
    out = machine.attention(kernel, plain, k.transpose(1, 2), v.transpose(1, 2))
    assert out.is_contiguous()


# -- grids ------------------------------------------------------------------------------------


@kernels
def test_report_10_every_grid_has_one_dimension(monkeypatch, kernel, interpreter):
    """Only the first may pass 65,535; the product of the others and it stays under 2^31."""
    q = torch.empty(70_000, 1, 16, 64, dtype=torch.float16, device="meta")
    mask = torch.empty(70_000, 1, 16, 16, dtype=torch.bool, device="meta")
    problem = AttentionParams(0.125, False, "bhsd", mask)
    made = plan(monkeypatch, kernel, q, q.clone(), q.clone(), problem=problem)
    assert made.grids
    for grid in made.grids:
        assert len(grid) == 1
        assert 70_000 <= grid[0] < BEYOND


@kernels
def test_report_10_seventy_thousand_heads(gpu, kernel):
    generator = torch.Generator(gpu.device).manual_seed(0)
    shape = (70_000, 1, 16, 64)
    q, k, v = (torch.randn(shape, generator=generator, device=gpu.device).half() for _ in range(3))
    mask = torch.rand(70_000, 1, 1, 16, generator=generator, device=gpu.device) > 0.3
    mask[..., 3] = True
    out, lse = gpu.attention(kernel, q, k, v, mask, return_lse=True)
    for part in (slice(0, 40), slice(65_500, 65_580), slice(69_990, 70_000)):
        some = (q[part], k[part], v[part], mask[part])
        expected, expected_lse = definition(*some)
        assert_close(kernel, out[part], expected, times=3)
        assert (lse[part] - expected_lse).abs().max() < (0.2 if kernel == "fav3_fp8" else 0.1)


@kernels
def test_report_10_seventy_thousand_sequences(gpu, kernel):
    generator = torch.Generator(gpu.device).manual_seed(0)
    ends = torch.arange(0, 70_001, device=gpu.device, dtype=torch.int32) * 3
    q, k, v = (
        torch.randn(210_000, 1, 64, generator=generator, device=gpu.device).half() for _ in range(3)
    )
    options = gpu.options(kernel=kernel)
    out = sage_plugin.attention_varlen(q, k, v, ends, ends, 3, 3, **options)
    for first in (0, 65_535, 65_536, 69_999):
        rows = slice(3 * first, 3 * first + 3)
        some = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
        assert_close(kernel, out[rows].transpose(0, 1)[None], definition(*some)[0], times=4)


# -- blocks of the quantiser and of attention --------------------------------------------------


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_report_11_blocks_cannot_change_between_the_two_steps(machine, kernel, monkeypatch):
    q, k, v = machine.draw(Shape(1, 1, 1, 40, 70, 32))
    made = launch(16, 32)
    expected = machine.attention(kernel, q, k, v, launch=made)
    prepared = sage_plugin.prepare(q, k, v, **machine.options(kernel=kernel, launch=made))
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", json.dumps({"block_m": 64, "block_n": 64}))
    assert torch.equal(sage_plugin.launch(prepared), expected)
    assert "launch" not in inspect.signature(sage_plugin.launch).parameters
