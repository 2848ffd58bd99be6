"""Section G: a second GPU, streams, offloaded modules, and an LSE that a ring can use."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import sage_plugin
from sage_plugin.kernels import surroundings
from sage_plugin.kernels.attention import executor, prepare
from tests.kernels.calls import EMULATED, QUANTIZED, Shape
from tests.matrix.definition import definition
from tests.matrix.places import ON_GPU
from tests.reports.machine import assert_close

kernels = pytest.mark.parametrize("kernel", EMULATED)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
GPU = pytest.mark.usefixtures("gpu")
TENSORS_OF = Shape(2, 4, 2, 200, 300, 64)


def drawn(device):
    """Q, K and V, the same on every device."""
    return [
        torch.randn(size, generator=torch.Generator().manual_seed(i)).half().to(device)
        for i, size in enumerate([(2, 4, 200, 64), (2, 2, 300, 64), (2, 2, 300, 64)])
    ]


def entrances(kernel, device, tensors=None):
    """A call of each entrance."""
    q, k, v = tensors or drawn(device)
    ends = torch.tensor([0, 3, 200], dtype=torch.int32, device=device)
    mask = torch.arange(300, device=device) < 290
    options = {"kernel": kernel, "is_causal": True}
    return {
        "attention": lambda: sage_plugin.attention(q, k, v, mask, **options),
        "varlen": lambda: sage_plugin.attention_varlen(
            *(x[0].transpose(0, 1)[:200] for x in (q, k, v)), ends, ends, 197, 197, **options
        ),
        "two steps": lambda: sage_plugin.launch(sage_plugin.prepare(q, k, v, mask, **options)),
    }


ENTRANCES = ("attention", "varlen", "two steps")


@GPU
@two_gpus
@kernels
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_report_81_and_82_and_88_the_second_gpu_while_the_first_is_current(kernel, entrance):
    torch.cuda.set_device(0)
    expected = entrances(kernel, "cuda:0")[entrance]()
    call = entrances(kernel, "cuda:1")[entrance]
    before = torch.cuda.memory_allocated(0)
    out = call()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.cpu(), expected.cpu())


@GPU
@two_gpus
@kernels
def test_report_81_a_compiled_call_on_the_second_gpu(kernel):
    torch._dynamo.reset()
    torch.cuda.set_device(0)
    q, k, v = (torch.randn(1, 4, 300, 64, device="cuda:1").half() for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v: sage_plugin.attention(q * 2, k, v, kernel=kernel), fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), sage_plugin.attention(q * 2, k, v, kernel=kernel))
    assert torch.cuda.current_device() == 0


@GPU
@two_gpus
@kernels
def test_report_82_the_first_gpu_stays_current_after_an_error(kernel):
    torch.cuda.set_device(0)
    q, k, v = (torch.randn(1, 6, 30, 64, device="cuda:1") for _ in range(3))
    with pytest.raises(sage_plugin.errors.UnsupportedInputError):
        sage_plugin.attention(q, k[:, :4], v[:, :4], kernel=kernel)
    with pytest.raises(sage_plugin.errors.UnsupportedInputError, match="move them to one device"):
        sage_plugin.attention(q, k.to("cuda:0"), v, kernel=kernel)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_report_81_and_82_and_88_every_launch_is_inside_a_guard(monkeypatch, entrance):
    """Both steps run with the device of Q current, whatever it is."""
    inside, guarded = [], []

    @contextlib.contextmanager
    def guard(device):
        inside.append(device)
        yield
        inside.pop()

    stock = executor.built

    def built(decision, facts):
        made = stock(decision, facts)

        class Watched:
            def prepare(self, *arguments, **more):
                guarded.append(("prepare", list(inside)))
                return made.prepare(*arguments, **more)

            def launch(self, *arguments, **more):
                guarded.append(("launch", list(inside)))
                return made.launch(*arguments, **more)

        return Watched()

    for module in (executor, prepare):
        monkeypatch.setattr(module, "on_device", guard)
        monkeypatch.setattr(module, "built", built)
    entrances("sage", "cpu")[entrance]()
    device = torch.device("cpu")
    assert guarded == [("prepare", [device]), ("launch", [device])]


@pytest.mark.parametrize("current", [0, 1])
def test_report_82_the_guard_is_of_torch_and_gives_back(monkeypatch, current):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append("back")

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("set_device leaks"))
    device = torch.device("cuda", 1)
    with surroundings.on_device(device):
        pass
    assert entered == ([] if current == 1 else [device, "back"])


@pytest.mark.parametrize("beside_a_gpu", [False, pytest.param(True, marks=ON_GPU)])
def test_report_84_tensors_of_an_offloaded_module(beside_a_gpu):
    q, k, v = (torch.randn(1, 2, 40, 64) for _ in range(3))
    out = sage_plugin.attention(q, k, v)
    assert out.device.type == "cpu"
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    for kernel in QUANTIZED:
        assert_close(
            kernel, sage_plugin.attention(q, k, v, kernel=kernel), definition(q, k, v)[0], times=3
        )
    if beside_a_gpu:
        with pytest.raises(sage_plugin.errors.UnsupportedInputError, match="move them"):
            sage_plugin.attention(q, k.cuda(), v.cuda(), kernel="sage")
        with pytest.raises(
            sage_plugin.errors.UnsupportedInputError, match="tensors are on the CPU"
        ):
            sage_plugin.attention(q, k, v, kernel="sage", variant="portable")


@kernels
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_report_76_and_85_a_call_waits_for_its_own_stream_alone(gpu, kernel, entrance):
    """What a side stream copies to the GPU is there before the call on that stream reads it."""
    sources = drawn(gpu.device)
    expected = entrances(kernel, gpu.device, sources)[entrance]()
    tensors = [torch.zeros_like(x) for x in sources]
    call = entrances(kernel, gpu.device, tensors)[entrance]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)  # the copies below are not done when the call is queued
        for x, source in zip(tensors, sources, strict=True):
            x.copy_(source)
        out = call()
        assert torch.cuda.current_stream() == stream
        kept = out.clone()
    stream.synchronize()
    assert torch.equal(kept, expected)


@kernels
def test_report_85_no_step_waits_for_the_device(gpu, kernel):
    """A call returns before the work queued ahead of it is done."""
    for call in entrances(kernel, gpu.device).values():
        call()
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)
        done.record()
        call()
        assert not done.query()
        torch.cuda.synchronize()


@kernels
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_report_86_the_lse_is_contiguous_and_owns_its_storage(machine, kernel, layout):
    shape = machine.pick(Shape(2, 2, 1, 10, 20, 32), TENSORS_OF)
    q, k, v = machine.draw(shape, layout=layout)
    out, lse = machine.attention(kernel, q, k, v, layout=layout, return_lse=True)
    assert (lse.shape, lse.dtype) == ((shape.batch, shape.heads_q, shape.seq_q), torch.float32)
    assert lse.is_contiguous()
    assert lse.storage_offset() == 0
    assert lse.untyped_storage().nbytes() == 4 * lse.numel()
    assert lse.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    lse.view(-1, shape.seq_q, 1)
    ends = torch.tensor([0, 3, shape.seq_q], dtype=torch.int32, device=machine.device)
    packed = [x[0] if layout == "bshd" else x[0].transpose(0, 1) for x in (q, k, v)]
    packed = [x[: shape.seq_q] for x in packed]
    options = machine.options(kernel=kernel, return_lse=True)
    _, lse = sage_plugin.attention_varlen(*packed, ends, ends, shape.seq_q, shape.seq_q, **options)
    assert lse.shape == (shape.heads_q, shape.seq_q)
    assert lse.is_contiguous()
    assert lse.untyped_storage().nbytes() == 4 * lse.numel()
