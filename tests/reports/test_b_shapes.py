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
from sage_plugin.schema import CallShape
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, launch
from tests.kernels.devices import facts

kernels = pytest.mark.parametrize("kernel", EMULATED)
quantized = pytest.mark.parametrize("kernel", QUANTIZED)


# -- lengths ----------------------------------------------------------------------------------


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
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1201", "emulation"])
def test_report_30_no_block_is_under_what_a_product_needs(kernel, arch):
    smallest = 16 if kernel == "fav2" else 32
    seen = 0
    for seq in (1, 8):
        shape = CallShape(1, 1, 1, seq, seq, 64, 64, "float16", False, "none", "bhsd", 0.125)
        key = dispatch.call_key(shape, dispatch.Decision(kernel, "portable"))
        for config in launch_space.candidates(key, facts(arch)):
            seen += 1
            assert config.block_m >= 16
            assert config.block_n >= smallest
    assert seen
    x = torch.randn(1, 1, 4, 32)
    for blocks in ((8, 64), (64, smallest // 2)):
        with pytest.raises(UnsupportedInputError, match="is not a power of two between"):
            sage_plugin.attention(x, x, x, kernel=kernel, launch=launch(*blocks))


# -- head dims --------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [257, 384, 512])
def test_report_18_head_dims_of_image_decoders_go_to_the_host(machine, dim):
    q, k, v = machine.draw(Shape(1, 1, 1, 20, 40, dim), torch.bfloat16)
    right = F.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(sage_plugin.attention(q, k, v), right, atol=1e-2)
    for kernel in EMULATED:
        with pytest.raises(UnsupportedInputError, match=f"head dim {dim} is over 256"):
            machine.attention(kernel, q, k, v)


def test_report_21_every_call_is_judged_by_its_own_shape():
    hopper = facts("sm_90")

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
    prepared = sage_plugin.prepare(q, k, v, kernel=kernel, variant="portable", with_lse=False)
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
