"""Section C: masks of every form, honoured tile by tile, beside causality and grouped heads."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import sage_plugin
from tests.kernels.calls import EMULATED, Shape, relative_l1
from tests.reports.machine import allowed, assert_close, exact

kernels = pytest.mark.parametrize("kernel", EMULATED)


def shape_of(machine, **more):
    base = machine.pick(
        {"batch": 2, "heads_q": 2, "heads_k": 1, "seq_q": 20, "seq_k": 40, "dim": 32},
        {"batch": 2, "heads_q": 4, "heads_k": 2, "seq_q": 300, "seq_k": 500, "dim": 64},
    )
    return Shape(**base | more)


def keeping(machine, *size, share=0.6, seed=1):
    """A bool mask in which every row sees something."""
    keep = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share
    keep[..., size[-1] // 2] = True
    return keep.to(machine.device)


def as_floats(mask, dtype=torch.float32):
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


@kernels
@pytest.mark.parametrize("form", ["key", "dense"])
def test_report_32_a_hidden_key_has_no_part_in_the_output(machine, kernel, form):
    shape = shape_of(machine)
    q, k, v = machine.draw(shape)
    v[:, :, -1] = 1e3
    mask = torch.ones(1, 1, 1, shape.seq_k, dtype=torch.bool, device=machine.device)
    mask[..., -1] = False
    if form == "dense":
        mask = mask.expand(1, 1, shape.seq_q, shape.seq_k).contiguous()
    expected = exact(q, k[:, :, :-1], v[:, :, :-1])[0]
    for given in (mask, as_floats(mask)):
        out = machine.attention(kernel, q, k, v, given, out_dtype=torch.float32)
        assert_close(kernel, out, expected, times=3)


def test_report_33_no_entrance_takes_names_that_it_does_not_know():
    names = ("attention", "attention_varlen", "prepare", "launch")
    for name in names:
        kinds = {p.kind for p in inspect.signature(getattr(sage_plugin, name)).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    x = torch.ones(1, 1, 4, 32)
    with pytest.raises(TypeError, match="mask"):
        sage_plugin.attention(x, x, x, mask=torch.ones(4, 4).bool())


@kernels
def test_report_34_padded_sequences_equal_the_ones_alone(machine, kernel):
    full, length = machine.pick((16, 5), (700, 333))
    q, k, v = machine.draw(shape_of(machine, seq_q=full, seq_k=full))
    mask = torch.ones(2, 1, 1, full, dtype=torch.bool, device=machine.device)
    mask[1, ..., : full - length] = False
    out = machine.attention(kernel, q, k, v, mask, is_causal=True, out_dtype=torch.float32)
    assert_close(kernel, out[:1], exact(q[:1], k[:1], v[:1], causal=True)[0], times=3)
    own = [x[1:, :, -length:] for x in (q, k, v)]
    assert_close(kernel, out[1:, :, -length:], exact(*own, causal=True)[0], times=3)
    assert (out[1, :, : full - length] == 0).all()


@kernels
@pytest.mark.parametrize("form", ["S x S", "key", "item", "head", "a head's keys", "expanded"])
def test_report_35_masks_of_every_shape(machine, kernel, form):
    shape = shape_of(machine)
    batch, heads, rows, keys = shape.batch, shape.heads_q, shape.seq_q, shape.seq_k
    size = {
        "S x S": (rows, keys),
        "key": (batch, 1, 1, keys),
        "item": (batch, 1, rows, keys),
        "head": (batch, heads, rows, keys),
        "a head's keys": (1, heads, 1, keys),
        "expanded": (batch, 1, rows, keys),
    }[form]
    mask = keeping(machine, *size)
    if form == "expanded":
        mask = mask[:, :, :1].expand(batch, heads, rows, keys)
        assert 0 in mask.stride()
    tensors = machine.draw(shape)
    machine.checked(kernel, *tensors, mask, times=3)
    bias = machine.normal(*size).masked_fill(~(mask[:, :1] if form == "expanded" else mask), -1e9)
    machine.checked(kernel, *tensors, bias, times=3)


@kernels
@pytest.mark.parametrize("form", ["key", "dense"])
def test_report_36_a_bias_is_in_natural_log_units(machine, kernel, form):
    shape = shape_of(machine)
    q, k, v = machine.draw(shape)
    # V and bias go together, so that a wrong factor moves the mean of the output.
    v[:, :, ::2] += 2.0
    bias = torch.zeros(1, 1, 1, shape.seq_k, device=machine.device)
    bias[..., ::2] = -2.0
    if form == "dense":
        bias = bias.expand(1, 1, shape.seq_q, shape.seq_k).contiguous()
    out, _ = machine.checked(kernel, q, k, v, bias, times=2)
    for factor in (math.log(2), 1 / math.log(2)):
        assert relative_l1(out, exact(q, k, v, bias * factor)[0]) > 3 * allowed(kernel)


@kernels
def test_report_37_dead_rows_and_dead_blocks(machine, kernel):
    shape = shape_of(machine, seq_k=machine.pick(140, 400))
    tensors = machine.draw(shape)
    mask = torch.ones(1, 1, shape.seq_q, shape.seq_k, dtype=torch.bool, device=machine.device)
    mask[:, :, 3] = False
    mask[:, :, 7:9, :128] = False
    mask[:, :, 12:, :128] = False
    every = (mask, as_floats(mask), as_floats(mask, torch.bfloat16))
    for given in machine.pick(every[:2], every):
        out, lse = machine.checked(kernel, *tensors, given, times=4)
        assert (out[:, :, 3] == 0).all()
        assert (lse[:, :, 3] == -math.inf).all()
    nobody = torch.zeros(shape.batch, 1, 1, shape.seq_k, dtype=torch.bool, device=machine.device)
    nobody[1] = True
    out, lse = machine.checked(kernel, *tensors, nobody, times=3)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()


@kernels
@pytest.mark.parametrize("form", ["key", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_report_39_large_negative_biases_of_every_dtype(machine, kernel, form, dtype):
    """-1e4 of fp16, and the lowest number of a type in place of -inf."""
    if not machine.on_gpu and (dtype == torch.float32 or (dtype, form) == (torch.float16, "key")):
        pytest.skip("two of them are enough in the interpreter")
    shape = shape_of(machine)
    q, k, v = machine.draw(shape, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    mask = keeping(machine, 2, 1, 1 if form == "key" else shape.seq_q, shape.seq_k)
    lowest = -1e4 if dtype == torch.float16 else torch.finfo(dtype).min
    bias = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    out, lse = machine.checked(kernel, q, k, v, bias, times=3)
    hard = machine.attention(kernel, q, k, v, mask, return_lse=True, out_dtype=torch.float32)
    assert_close(kernel, out, hard[0], dtype=v.dtype)
    assert (lse - hard[1]).abs().max() < 0.05
    # Rows all of whose keys have it: dead under -1e38, else only a constant off.
    out, lse = machine.attention(
        kernel, q, k, v, torch.full_like(bias, max(lowest, -1.5e38)), return_lse=True,
        out_dtype=torch.float32,
    )  # fmt: skip
    if dtype == torch.float16:
        assert_close(kernel, out, exact(q, k, v)[0], times=3)
        assert (lse + 1e4 - exact(q, k, v)[1]).abs().max() < 0.1
    else:
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@kernels
@pytest.mark.parametrize("form", ["key", "dense"])
@pytest.mark.parametrize("more_keys", [False, True])
def test_report_41_causality_and_padding_hold_together(machine, kernel, form, more_keys):
    shape = shape_of(machine)
    if not more_keys:
        shape = shape_of(machine, seq_q=shape.seq_k, seq_k=shape.seq_q)
    mask = keeping(machine, 2, 1, 1 if form == "key" else shape.seq_q, shape.seq_k)
    q, k, v = machine.draw(shape)
    v += 2 * torch.linspace(-1, 1, shape.seq_k, device=v.device)[:, None].half()
    v[:, :, ::5] += 1.0
    mask[..., ::5] = False
    mask[..., 0] = True
    tensors = (q, k, v)
    out, _ = machine.checked(kernel, *tensors, mask, is_causal=True, times=3)
    for dropped in (exact(*tensors, mask)[0], exact(*tensors, causal=True)[0]):
        assert relative_l1(out, dropped) > 2 * allowed(kernel)


@pytest.mark.usefixtures("large_memory")
def test_report_42_the_host_never_holds_all_scores_of_grouped_heads(gpu):
    shape = (1, 32, 4096, 64)
    q = torch.randn(shape, device=gpu.device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 4096, 64, device=gpu.device).bfloat16() for _ in range(2))
    mask = torch.ones(1, 1, 4096, 4096, dtype=torch.bool, device=gpu.device).tril()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = sage_plugin.attention(q, k, v, mask, kernel="sdpa", enable_gqa=True)
    scores = 32 * 4096 * 4096 * q.element_size()
    assert torch.cuda.max_memory_allocated() - before < scores // 2
    expected = exact(q[:, :4, :100], k[:, :1], v[:, :1], mask[:, :, :100])[0]
    assert relative_l1(out[:, :4, :100], expected) < 0.01


@kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_report_41_what_is_padded_may_hold_anything(machine, kernel, bad):
    shape = shape_of(machine)
    q, k, v = machine.draw(shape)
    mask = torch.ones(2, 1, 1, shape.seq_k, dtype=torch.bool, device=machine.device)
    mask[0, ..., -9:] = False
    clean = machine.attention(kernel, q, k, v, mask, is_causal=True)
    k[0, :, -9:], v[0, :, -9:] = bad, -bad
    assert torch.equal(machine.attention(kernel, q, k, v, mask, is_causal=True), clean)
