"""Section F: the ops under a compiler, in CUDA graphs and on streams."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

import sage_plugin
from tests.kernels.calls import EMULATED, Shape, launch
from tests.matrix.definition import definition
from tests.reports.machine import assert_close

pytestmark = pytest.mark.usefixtures("no_graphs")
kernels = pytest.mark.parametrize("kernel", EMULATED)
ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(2, 4, 2, 200, 333, 80)


def arguments(machine, kernel, *, packed=False, mask=None, sinks=None, config=None):
    """Positional arguments of an op, as a caller of the raw op gives them."""
    shape = machine.pick(Shape(1, 2, 1, 10, 20, 80), SHAPE)
    config = config or ("" if machine.on_gpu else launch(32, 32).text())
    numbers = (0.1, True, -1, -1, 0.0, kernel, "portable")
    if packed:
        q, k, v = (x[0].transpose(0, 1) for x in machine.draw(shape, torch.bfloat16))
        ends = [
            torch.tensor([0, 3, n], dtype=torch.int32, device=machine.device)
            for n in (shape.seq_q, shape.seq_k)
        ]
        lengths = (shape.seq_q - 3, shape.seq_k - 3)
        return (q, k, v, *ends, *lengths, sinks, *numbers, config, "", None)
    q, k, v = machine.draw(shape, torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    return (q, k, v, mask, sinks, *numbers, "bhsd", config, "", None)


OPS = {
    "attention": False,
    "attention_with_lse": False,
    "attention_varlen": True,
    "attention_varlen_with_lse": True,
}


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@kernels
@pytest.mark.parametrize("name", OPS)
def test_report_65_and_71_every_op_writes_all_of_its_output(gpu, kernel, name):
    """On what other calls left in memory; compiled too, where a fake once took the op's place."""
    op = getattr(torch.ops.sage_plugin, name).default
    given = arguments(gpu, kernel, packed=OPS[name])
    tensors, rest = given[:3], given[3:]
    compiled = torch.compile(lambda q, k, v: op(q, k, v, *rest), fullgraph=True)
    gpu.nan_memory()
    eager = outputs(op(*given))
    gpu.nan_memory()
    for mine, expected in zip(outputs(compiled(*tensors)), eager, strict=True):
        assert torch.equal(mine, expected)
    q, k, v = (x.transpose(0, 1)[None] for x in tensors) if OPS[name] else tensors
    for at in (slice(0, 3), slice(3, None)) if OPS[name] else (slice(None),):
        own = [x[:, :, at] for x in (q, k, v)]
        expected, _ = definition(*own, is_causal=True, scale=0.1)
        out = eager[0].transpose(0, 1)[None] if OPS[name] else eager[0]
        assert_close(kernel, out[:, :, at], expected, times=4, dtype=torch.bfloat16)
    if len(eager) == 2:
        assert not eager[1].isnan().any()


@pytest.mark.parametrize("name", OPS)
def test_report_71_the_real_op_runs_and_not_its_fake(interpreter, name, monkeypatch):
    for maker in ("empty", "empty_strided", "empty_like"):
        stock = getattr(torch, maker)

        def filled(*size, stock=stock, **options):
            out = stock(*size, **options)
            floats = out.is_floating_point() and out.element_size() > 1 and not out.is_meta
            return out.fill_(torch.nan) if floats else out

        monkeypatch.setattr(torch, maker, filled)
    op = getattr(torch.ops.sage_plugin, name).default
    for out in outputs(op(*arguments(interpreter, "sage", packed=OPS[name]))):
        assert not out.isnan().any()
        assert out[out.isfinite()].float().abs().sum() > 0


class Block(torch.nn.Module):
    """Projections around attention, as a transformer has them."""

    def __init__(self, kernel, heads=4, dim=64, **options):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.kernel, self.options = heads, kernel, options
        self.qkv = torch.nn.Linear(heads * dim, 3 * heads * dim)
        self.out = torch.nn.Linear(heads * dim, heads * dim)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y, lse = sage_plugin.attention(
            q, k, v, mask, kernel=self.kernel, layout="bshd", return_lse=True, **self.options
        )
        return self.out(y.flatten(2)) + lse.mean()


def block(gpu, kernel, **options):
    return Block(kernel, **options).to(gpu.device, torch.bfloat16).eval().requires_grad_(False)


@kernels
@pytest.mark.parametrize("masked", [False, True])
def test_report_73_a_block_is_one_graph(gpu, kernel, masked):
    module = block(gpu, kernel, is_causal=True, softcap=20.0)
    x = gpu.normal(2, 300, 256, dtype=torch.bfloat16)
    mask = gpu.normal(2, 1, 1, 300) if masked else None
    explained = torch._dynamo.explain(module)(x, mask)
    assert explained.graph_break_count == 0
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)(x, mask)
    expected = module(x, mask)
    assert (compiled - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("masked", [False, True])
def test_report_74_opcheck_of_the_portable_kernels(machine, name, masked):
    """At a head dim that is padded, with a transposed Q."""
    op = getattr(torch.ops.sage_plugin, name).default
    more = {"sinks": machine.normal(machine.pick(2, 4))} if masked else {}
    if masked and not OPS[name]:
        more["mask"] = machine.normal(1, 1, *machine.pick((10, 20), (200, 333)))
    if not machine.on_gpu and masked == name.endswith("_lse"):
        pytest.skip("every other one is enough in the interpreter")
    for kernel in machine.pick(("sage",), EMULATED):
        given = arguments(machine, kernel, packed=OPS[name], **more)
        torch.library.opcheck(op, given)
        real = outputs(op(*given))
        fake = outputs(op(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in given)))
        for mine, told in zip(real, fake, strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (
                told.shape, told.stride(), told.dtype,
            )  # fmt: skip


@pytest.mark.parametrize("kernel", ["fav2", "sage", "fav3_fp8"])
def test_report_75_new_lengths_share_a_graph(gpu, kernel):
    module = block(gpu, kernel)
    # Inductor guards sizes of its own, for the layers around the attention.
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    counts = []
    for seq in (257, 300, 512, 777):
        x = gpu.normal(1, seq, 256, dtype=torch.bfloat16, seed=seq)
        assert (compiled(x) - module(x)).abs().max() < 0.05 * module(x).abs().max()
        counts.append(counter.frame_count)
    assert counts[-1] <= 2
    assert counts[1:] == counts[1:2] * 3


@kernels
def test_report_75_new_lengths_of_packed_sequences_share_a_graph(gpu, kernel):
    def call(q, k, v, ends, longest):
        return sage_plugin.attention_varlen(
            q * 2, k, v, ends, ends, longest, longest, kernel=kernel, is_causal=True
        )

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for ends in ([0, 70, 300], [0, 5, 40, 200], [0, 111, 444], [0, 9, 10, 20, 500]):
        q, k, v = (gpu.normal(ends[-1], 2, 64, dtype=torch.float16, seed=i) for i in range(3))
        cu = torch.tensor(ends, dtype=torch.int32, device=gpu.device)
        longest = int(cu.diff().max())
        assert torch.equal(compiled(q, k, v, cu, longest), call(q, k, v, cu, longest))
    assert counter.frame_count <= 3


def captured(call):
    """A CUDA graph of a call, and what it writes to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@kernels
def test_report_76_a_graph_of_every_part_sees_changed_inputs(gpu, kernel):
    q, k, v = gpu.draw(Shape(2, 4, 2, 300, 400, 64))
    mask, sinks = gpu.normal(2, 1, 300, 400), gpu.normal(4)
    given = (q, k, v, mask, sinks)

    def call():
        return gpu.attention(
            kernel, q, k, v, mask, sinks=sinks, softcap=20.0, window=(200, 50), return_lse=True
        )

    graph, replayed = captured(call)
    for seed in range(3):
        for x in given:
            x.copy_(gpu.normal(*x.shape, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        kept = [x.clone() for x in replayed]
        for mine, expected in zip(kept, call(), strict=True):
            assert torch.equal(mine, expected)


@kernels
def test_report_76_a_graph_of_packed_sequences_sees_changed_bounds(gpu, kernel):
    q, k, v = (gpu.normal(500, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    ends = torch.tensor([0, 100, 300, 500], dtype=torch.int32, device=gpu.device)

    def call():
        return sage_plugin.attention_varlen(
            q, k, v, ends, ends, 400, 400, kernel=kernel, is_causal=True
        )

    graph, replayed = captured(call)
    for bounds in ([0, 1, 2, 400], [0, 0, 333, 500]):
        ends.copy_(torch.tensor(bounds, dtype=torch.int32))
        q.copy_(gpu.normal(*q.shape, seed=bounds[2]))
        graph.replay()
        torch.cuda.synchronize()
        kept = replayed.clone()
        assert torch.equal(kept[: bounds[-1]], call()[: bounds[-1]])


def test_report_80_a_second_copy_of_the_package_is_named(tmp_path):
    """A vendored copy that defines the ops again is told of the first one, which goes on."""
    copy = tmp_path / "vendored"
    shutil.copytree(ROOT / "sage_plugin", copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
        import importlib, torch, sage_plugin
        x = torch.randn(1, 1, 8, 32)
        before = sage_plugin.attention(x, x, x, kernel="sage")
        try:
            importlib.import_module("vendored.kernels.attention.torch_ops")
        except RuntimeError as error:
            said = str(error)
            assert "namespace sage_plugin" in said, said
            for package in ("sage_plugin", "vendored"):
                assert f"{package}/kernels/attention/torch_ops.py" in said, said
        assert torch.equal(sage_plugin.attention(x, x, x, kernel="sage"), before)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
