"""Patched linears on a device: its memory, its graphs, moves; needs no host library."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sage_plugin
from sage_plugin import device
from sage_plugin.kernels.linear.dispatch import automatic_kernel
from tests.plugin.toys import Direct, ToyAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no device"),
]
WIDTH, TOKENS = 1024, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn = ToyAttention(Direct())
        self.ff = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(self.norm(x) * (1 + x[:, :1]) + x[:, 1:2])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Model().cuda().bfloat16().requires_grad_(False)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)


def first(model: Model) -> nn.Linear:
    return model.blocks[0].ff[0]


def test_weights_leave_the_device_and_come_back_to_the_bit(model, x):
    plain, bits = model(x), copy.deepcopy(model.state_dict())
    held = torch.cuda.memory_allocated()
    handle = sage_plugin.patch(model, linears="auto")
    assert torch.cuda.memory_allocated() - held < -0.9 * 4 * WIDTH * WIDTH
    assert handle.report().saved_bytes() > 0.9 * 4 * WIDTH * WIDTH
    assert first(model)._parameters["weight"].device.type == "cpu"
    out = model(x)
    error = float((out - plain).float().norm() / plain.float().norm())
    assert 1e-4 < error < 0.04
    kernel = automatic_kernel(device.facts("cuda"))
    for row in handle.report().linears:
        (label,) = row.calls
        assert label.startswith(f"{kernel}:")
        assert not label.endswith(":emulation")
    assert all(torch.equal(v.cuda(), bits[k]) for k, v in model.state_dict().items())
    handle.unpatch()
    assert all(torch.equal(v, bits[k]) for k, v in model.state_dict().items())
    assert torch.equal(model(x), plain)


def test_copies_moves_writes_and_graphs(model, x):
    plain = model(x)
    handle = sage_plugin.patch(model, linears="auto")
    ours = model(x)
    twin = copy.deepcopy(model)
    assert twin.blocks[0].ff[0].weight.is_cuda
    assert torch.equal(twin(x), plain)
    model.to("cpu")
    assert first(model)._sage_linear.quantized.data.device.type == "cpu"
    model.to("cuda")
    assert first(model)._parameters["weight"].device.type == "cpu"
    assert torch.equal(model(x), ours)
    first(model).weight.data += 1.0
    assert first(model)._parameters["weight"].is_cuda
    assert not torch.equal(model(x), ours)
    first(model).weight.data -= 1.0
    compiled = torch.compile(model, fullgraph=True)
    graph, eager = compiled(x).float(), model(x).float()
    assert float((graph - eager).norm() / eager.norm()) < 0.05  # of rounding to FP8, 0.03
    handle.unpatch()


def test_a_model_that_comes_to_the_device_later_is_quantized_there(model, x):
    model.cpu()
    handle = sage_plugin.patch(model, linears="auto")
    assert first(model)._sage_linear.quantized is None
    model.cuda()
    assert first(model)._parameters["weight"].device.type == "cpu"
    model(x)
    assert all(not row.fallbacks for row in handle.report().linears)
    handle.unpatch()
    assert first(model).weight.is_cuda


def test_originals_that_are_freed_free_memory(model, x):
    held = torch.cuda.memory_allocated()
    sage_plugin.patch(model, linears="auto", keep_originals=False)
    assert torch.cuda.memory_allocated() - held < -0.9 * 4 * WIDTH * WIDTH
    assert torch.isfinite(model(x)).all()
