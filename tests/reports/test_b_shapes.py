"""Section B: lengths, head dims, grouped heads, causal alignment, packed sequences, memory."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import sage_plugin
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import dispatch, launch_space
from sage_plugin.schema import CallShape, DeviceFacts
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, launch
from tests.reports.machine import assert_close, exact

kernels = pytest.mark.parametrize("kernel", EMULATED)
quantized = pytest.mark.parametrize("kernel", QUANTIZED)


def facts(kind, arch):
    return DeviceFacts("chip", "chip", kind, arch, 100, 80 << 30, 227 << 10, "float8_e4m3fn")


# -- lengths ----------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("seq_q", [1, 2, 15, 16, 17])
def test_report_15_decoding_steps_and_other_short_calls(machine, kernel, seq_q):
    for seq_k in machine.pick((1, 7, 65), (1, 7, 63, 64, 65, 1000)):
        heads = machine.pick(1, 16)
        tensors = machine.draw(Shape(1, heads, heads, seq_q, seq_k, machine.pick(32, 64)))
        machine.checked(kernel, *tensors, times=3)


def test_report_15_checks_stay_under_python_o():
    """What is refused is raised, not asserted, and short calls are right there too."""
    code = """
        import torch, sage_plugin
        from sage_plugin.errors import UnsupportedInputError
        assert False, "asserts are off"
        q, k, v = torch.randn(1, 16, 1, 64), torch.randn(1, 16, 7, 64), torch.randn(1, 16, 7, 64)
        for kernel in ("sage", "fav3_sage", "fav3_fp8"):
            out = sage_plugin.attention(q, k, v, kernel=kernel)
            right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            error = (out - right).abs().sum() / right.abs().sum()
            if not error < 0.15:
                raise SystemExit(f"{kernel}: {error}")
        for bad in (k[:, :3], k[..., :32], k[0], k.long()):
            try:
                sage_plugin.attention(q, bad, bad, kernel="sage")
            except UnsupportedInputError:
                continue
            raise SystemExit(f"{tuple(bad.shape)} was taken")
    """
    ran = subprocess.run(
        [sys.executable, "-O", "-c", textwrap.dedent(code)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@kernels
@pytest.mark.parametrize("causal", [False, True])
def test_report_16_and_31_keys_have_a_length_of_their_own(machine, kernel, causal):
    lengths = machine.pick(((10, 40), (40, 33)), ((200, 777), (777, 200), (2048, 8192)))
    for seq_q, seq_k in lengths:
        shape = Shape(1, machine.pick(1, 2), machine.pick(1, 2), seq_q, seq_k, 96)
        machine.checked(kernel, *machine.draw(shape), is_causal=causal, times=2)


@kernels
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 12), (12, 5), (390, 1170)])
def test_report_17_causal_is_aligned_at_the_last_key(machine, kernel, seq_q, seq_k):
    if not machine.on_gpu and seq_q > 100:
        seq_q, seq_k = 35, 80
    heads = machine.pick(1, 2)
    q, k, v = machine.draw(Shape(1, heads, heads, seq_q, seq_k, 64))
    out = machine.attention(kernel, q, k, v, is_causal=True, out_dtype=torch.float32)
    mask = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device).tril(seq_k - seq_q)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    alive = mask.any(1)
    assert_close(kernel, out[:, :, alive], expected[:, :, alive], times=2)
    assert (out[:, :, ~alive] == 0).all()


@quantized
@pytest.mark.parametrize("block_n", [32, 64, 128, 256])
def test_report_22_and_23_tails_of_every_block_beside_nan(machine, kernel, block_n):
    config = launch(16, block_n, num_warps=4, num_stages=1)
    lengths = (1, block_n - 1, block_n + 1)
    lengths = machine.pick(lengths, (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255))
    for turn, seq_k in enumerate(lengths):
        q, k, v = machine.draw(Shape(1, 1, 1, 16, seq_k, machine.pick(32, 64)))
        beyond = (math.nan, 6e4)[turn % 2]  # what is not finite is in no statistic anyway
        padded = [torch.full((1, 1, 512, x.shape[3]), beyond).to(x) for x in (k, v)]
        for buffer, x in zip(padded, (k, v), strict=True):
            buffer[:, :, :seq_k] = x
        keys, values = (x[:, :, :seq_k] for x in padded)
        machine.nan_memory(1 << 16)
        machine.checked(kernel, q, keys, values, launch=config, times=3)


@pytest.mark.parametrize("block_n", [16, 64, 128])
def test_report_23_tails_of_fav2_beside_nan(machine, block_n):
    for seq_k in machine.pick((1, 63, 65), (1, 15, 63, 64, 65, 129, 193)):
        q, k, v = machine.draw(Shape(1, 1, 1, 16, seq_k, 64))
        keys, values = (F.pad(x, (0, 0, 0, 300), value=math.nan)[:, :, :seq_k] for x in (k, v))
        machine.checked("fav2", q, keys, values, launch=launch(16, block_n, num_stages=1), times=2)


@kernels
def test_report_30_no_length_is_under_what_a_product_needs(machine, kernel):
    for seq in machine.pick((1, 3, 8), range(1, 9)):
        machine.checked(kernel, *machine.draw(Shape(1, 1, 1, seq, seq, 32)), times=4)


@kernels
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1201", "emulation"])
def test_report_30_no_block_is_under_what_a_product_needs(kernel, arch):
    smallest = 16 if kernel == "fav2" else 32
    kind = "hip" if arch.startswith("gfx") else "cpu" if arch == "emulation" else "cuda"
    seen = 0
    for seq in (1, 8):
        shape = CallShape(1, 1, 1, seq, seq, 64, 64, "float16", False, "none", "bhsd", 0.125)
        key = dispatch.call_key(shape, dispatch.Decision(kernel, "portable"))
        for config in launch_space.candidates(key, facts(kind, arch)):
            seen += 1
            assert config.block_m >= 16
            assert config.block_n >= smallest
    assert seen
    x = torch.randn(1, 1, 4, 32)
    for blocks in ((8, 64), (64, smallest // 2)):
        with pytest.raises(UnsupportedInputError, match="is not a power of two between"):
            sage_plugin.attention(x, x, x, kernel=kernel, launch=launch(*blocks))


# -- head dims --------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 48, 72, 80, 88, 96, 104, 112, 120])
def test_report_19_scale_is_from_the_true_head_dim(machine, kernel, dim):
    shape = machine.pick(Shape(1, 1, 1, 20, 40, dim), Shape(1, 4, 2, 300, 500, dim))
    q, k, v = machine.draw(shape)
    out, _ = machine.checked(kernel, q, k, v, times=2)
    padded = 1 << (dim - 1).bit_length()
    if padded > 1.1 * dim:
        wrong, _ = exact(q, k, v, scale=padded**-0.5)
        assert (out - wrong).abs().sum() > 1.2 * (out - exact(q, k, v)[0]).abs().sum()


@kernels
@pytest.mark.parametrize("dim", [1, 3, 160, 256])
def test_report_18_head_dims_that_others_refuse(machine, kernel, dim):
    shape = machine.pick(Shape(1, 1, 1, 20, 40, dim), Shape(1, 2, 2, 300, 500, dim))
    # Errors of few channels do not average out.
    machine.checked(kernel, *machine.draw(shape), times=3 if dim > 8 else 6)


@pytest.mark.parametrize("dim", [257, 384, 512])
def test_report_18_head_dims_of_image_decoders_go_to_the_host(machine, dim):
    q, k, v = machine.draw(Shape(1, 1, 1, 20, 40, dim), torch.bfloat16)
    right = F.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(sage_plugin.attention(q, k, v), right, atol=1e-2)
    for kernel in EMULATED:
        with pytest.raises(UnsupportedInputError, match=f"head dim {dim} is over 256"):
            machine.attention(kernel, q, k, v)


def test_report_21_every_call_is_judged_by_its_own_shape():
    hopper = facts("cuda", "sm_90")

    def chosen(dim):
        shape = CallShape(
            1, 24, 24, 9000, 9000, dim, dim, "bfloat16", False, "none", "bhsd", 0.1
        )  # fmt: skip
        return dispatch.decide(shape, hopper)

    assert [chosen(dim).kernel for dim in (64, 80, 384, 80)] == [
        "fav3_sage", "fav3_sage", "sdpa", "fav3_sage",
    ]  # fmt: skip
    assert "384" in str(chosen(384).reason)
    assert chosen(80).reason is None


@kernels
def test_report_21_packed_sequences_of_any_head_dim(machine, kernel):
    ends = torch.tensor([0, 7, 40], dtype=torch.int32, device=machine.device)
    q, k, v = (machine.normal(40, 2, 80, dtype=torch.bfloat16, seed=i) for i in range(3))
    out = sage_plugin.attention_varlen(
        q, k, v, ends, ends, 33, 33, out_dtype=torch.float32, **machine.options(kernel=kernel)
    )
    for rows in (slice(0, 7), slice(7, 40)):
        own = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
        assert_close(
            kernel, out[rows].transpose(0, 1)[None], exact(*own)[0], times=4, dtype=q.dtype
        )


# -- grouped heads ----------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2)], ids=str)
def test_report_25_and_26_groups_of_heads_and_their_lse(machine, kernel, heads):
    if not machine.on_gpu and heads[0] == 8:
        heads = {8: (2, 2), 2: (4, 2), 1: (3, 1)}[heads[1]]
    shape = machine.pick(Shape(1, *heads, 9, 30, 32), Shape(2, *heads, 300, 400, 64))
    q, k, v = machine.draw(shape)
    of_head = torch.arange(heads[1], device=k.device).view(-1, 1, 1).half()
    k, v = k + 8 * of_head, v * (1 + of_head) - of_head  # means and scales of its own
    config = launch(32, 32)
    out, lse = machine.checked(kernel, q, k, v, times=3, launch=config)
    assert lse.shape == (shape.batch, shape.heads_q, shape.seq_q)
    repeated = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    again = machine.attention(kernel, q, *repeated, out_dtype=torch.float32, launch=config)
    assert torch.equal(out, again)


@kernels
def test_report_25_heads_that_do_not_divide_are_refused(machine, kernel):
    q, k, v = machine.draw(Shape(1, 6, 4, 9, 9, 32))
    with pytest.raises(UnsupportedInputError, match=r"6.*4"):
        machine.attention(kernel, q, k, v)


# -- memory -----------------------------------------------------------------------------------


def operand_bytes(kernel, shape, padded_dim):
    """Bytes of 8-bit Q and K, of V in 8 or 16 bits, and of what is kept of rows and keys."""
    rows = shape.batch * shape.heads_q * shape.seq_q
    keys = shape.batch * shape.heads_k * shape.seq_k
    v_bytes = 2 if kernel == "sage" else 1
    return rows * (padded_dim + 8) + keys * ((1 + v_bytes) * padded_dim + 5)


@quantized
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("masked", [False, True])
def test_report_27_peak_memory_of_a_long_call(gpu, kernel, masked):
    shape = Shape(1, 28, 4, 65_536, 65_536, 128)
    q = torch.randn(1, 28, shape.seq_q, 128, device=gpu.device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 4, shape.seq_k, 128, device=gpu.device).bfloat16() for _ in range(2))
    q, k, v = (x[:, :, : x.shape[2]] for x in (q, k, v))
    mask = torch.arange(shape.seq_k, device=gpu.device) < 60_000 if masked else None
    warm = [x[:, :, :256] for x in (q, k, v)]
    gpu.attention(kernel, *warm, None if mask is None else mask[:256])
    torch.cuda.synchronize()
    inputs = sum(x.numel() * x.element_size() for x in (q, k, v))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = gpu.attention(kernel, q, k, v, mask)
    used = torch.cuda.max_memory_allocated() - before
    needed = operand_bytes(kernel, shape, 128) + out.numel() * out.element_size()
    assert inputs + used <= 1.05 * (inputs + needed)


@quantized
@pytest.mark.usefixtures("large_memory")
def test_report_27_inputs_may_be_freed_between_the_two_steps(gpu, kernel):
    shape = Shape(1, 16, 16, 16_384, 16_384, 128)
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    q, k, v = (
        torch.randn(1, 16, shape.seq_q, 128, device=gpu.device, dtype=torch.bfloat16)
        for _ in range(3)
    )
    size = q.numel() * q.element_size()
    expected = gpu.attention(kernel, q, k, v).cpu()
    prepared = sage_plugin.prepare(q, k, v, kernel=kernel, variant="portable")
    del q, k, v
    operands = operand_bytes(kernel, shape, 128)
    assert torch.cuda.memory_allocated() - empty <= 1.05 * operands
    torch.cuda.reset_peak_memory_stats()
    out = sage_plugin.launch(prepared)
    assert torch.cuda.max_memory_allocated() - empty <= 1.05 * (operands + size)
    assert torch.equal(out.cpu(), expected)


@quantized
@pytest.mark.parametrize("parts", [{}, {"is_causal": True, "window": (50, -1)}], ids=str)
def test_report_27_what_the_first_step_holds(machine, kernel, parts):
    """Whole blocks of 8-bit copies and their scales; nothing of Q, K and V."""
    shape = machine.pick(Shape(1, 1, 1, 64, 128, 64), Shape(1, 2, 1, 256, 512, 64))
    q, k, v = machine.draw(shape, torch.float32)
    prepared = sage_plugin.prepare(
        q, k, v, kernel=kernel, variant="portable", launch=launch(64, 64), **parts
    )
    assert prepared.held_bytes <= 1.05 * operand_bytes(kernel, shape, 64)
    expected = machine.attention(kernel, q, k, v, launch=launch(64, 64), **parts)
    for x in (q, k, v):
        x.fill_(math.nan)
    assert torch.equal(sage_plugin.launch(prepared), expected)


# -- packed sequences -------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("other_keys", [False, True])
def test_report_28_packed_sequences_are_calls_of_their_own(machine, kernel, causal, other_keys):
    ends_q = machine.pick([0, 5, 43, 44], [0, 5, 133, 134])
    ends_k = machine.pick([0, 40, 41, 70], [0, 70, 71, 130]) if other_keys else ends_q
    heads, dim = machine.pick((1, 32), (4, 64))
    q = machine.normal(ends_q[-1], 2 * heads, dim, dtype=torch.float16)
    k, v = (machine.normal(ends_k[-1], heads, dim, dtype=torch.float16, seed=i) for i in (1, 2))
    for first, last, mean in zip(ends_k, ends_k[1:], (-20, 0, 30), strict=False):
        k[first:last] += mean
    cu_q, cu_k = (torch.tensor(e, dtype=torch.int32, device=q.device) for e in (ends_q, ends_k))
    options = machine.options(
        kernel=kernel, is_causal=causal, return_lse=True,
        launch=machine.pick(launch(32, 32), launch(64, 64)),
    )  # fmt: skip
    out, lse = sage_plugin.attention_varlen(q, k, v, cu_q, cu_k, 128, 128, **options)
    assert lse.shape == (2 * heads, ends_q[-1])
    for i in range(3):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        own = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        alone, alone_lse = sage_plugin.attention(*own, **options)
        found, found_lse = out[rows].transpose(0, 1)[None], lse[None, :, rows]
        assert torch.equal(found, alone)
        assert torch.equal(found_lse, alone_lse)
        expected, expected_lse = exact(*own, causal=causal)
        alive = expected_lse.isfinite()
        if alive.any():
            assert_close(kernel, found[alive], expected[alive], times=4)
            assert (found_lse - expected_lse)[alive].abs().max() < 0.3
        assert (found[~alive] == 0).all()
