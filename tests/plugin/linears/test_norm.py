"""Norms that are modulated and quantized in one pass, whatever is done with them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.normalization import FP32LayerNorm
from torch import nn

import sage_plugin
from sage_plugin.plugin.linears import compute
from sage_plugin.plugin.linears.pending import PendingNorm
from tests.plugin import tiny_families
from tests.plugin.tiny import tiny

PATCH = {"kernel": "sdpa", "linears": "int8_row", "min_seq": 0}
WIDTH = 32


@pytest.fixture
def made_of_norms(monkeypatch):
    """What was made of norms: modulated or not, and in which dtype."""
    made, original = [], compute.quantize_norm

    def normalized(x, norm, weight, dtype):
        made.append((norm.factor is not None, norm.shift is not None, dtype))
        return original(x, norm, weight, dtype)

    monkeypatch.setattr(compute, "quantize_norm", normalized)
    return made


@pytest.mark.parametrize(
    ("name", "modulated"),
    [("cogx", 8), ("wan", 5), ("flux", 6), ("sd3", 9), ("qwen", 9), ("hunyuan_video", 6)],
)
def test_a_family_modulates_in_the_pass_of_its_norms(name, modulated, made_of_norms):
    family = name in tiny_families.FAMILIES
    model = tiny_families.tiny(name) if family else tiny(name)
    plain = model.run()
    handle = sage_plugin.patch(model.module, **PATCH)
    first = model.run()  # each norm looks at who writes its input
    made_of_norms.clear()
    out = model.run()
    assert torch.equal(out, first)
    assert made_of_norms.count((True, True, torch.float32)) == modulated
    handle._parts[0].linears.norms.release()
    expected = model.run()
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-2 * float(expected.std()))
    assert float((out - expected).norm() / expected.norm()) < 2e-3
    handle.unpatch()
    assert torch.equal(model.run(), plain)


@functools.cache
def models(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    model = tiny("cogx").module.to(dtype)
    plain = copy.deepcopy(model)
    sage_plugin.patch(model, **PATCH)
    with torch.no_grad():
        model.transformer_blocks[0].norm1.norm(x.to(dtype)) + 0
    return model, plain


def block(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, nn.Module]:
    """A patched norm in front of patched linears, and its plain copy."""
    model, plain = models(dtype)
    return model.transformer_blocks[0].norm1.norm, plain.transformer_blocks[0].norm1.norm


x, s, t = torch.randn(2, 6, WIDTH), torch.randn(2, 1, WIDTH), torch.randn(2, 1, WIDTH)
CHAINS = {
    "modulate": lambda n, s, t: n * (1 + s) + t,
    "modulate, other way round": lambda n, s, t: t + (1 + s) * n,
    "scale alone": lambda n, s, t: n * (1 + s),
    "shift alone": lambda n, s, t: n + t,
    "two scales": lambda n, s, t: n * (1 + s) * (1 + t),
    "two shifts": lambda n, s, t: n + s + t,
    "a number": lambda n, s, t: n * 2.0 + 1.0,
    "minus": lambda n, s, t: n - t,
    "part": lambda n, s, t: n[:, 2:4] * (1 + s),
    "joined": lambda n, s, t: torch.cat([n, n * s], dim=1),
    "addcmul": lambda n, s, t: torch.addcmul(t, n, s),
    "broadcast up": lambda n, s, t: n[:, :1] * torch.cat([s, s], 1),
    "chunks": lambda n, s, t: n.chunk(2, dim=-1)[1],
    "view": lambda n, s, t: n.view(12, WIDTH).t(),
    "in place": lambda n, s, t: n.add_(1.0),
    "read twice": lambda n, s, t: n + n,
    "shape": lambda n, s, t: n.new_zeros(n.shape) + n.size(1) + n.numel() + len(n),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_done_with_a_norm_gives_what_it_gives_unpatched(chain, dtype):
    norm, plain = block(dtype)
    inputs = [value.to(dtype) for value in (s, t)]
    with torch.no_grad():
        pending = norm(x.to(dtype))
        assert type(pending) is PendingNorm
        assert (pending.shape, pending.dtype) == (x.shape, dtype)
        out = CHAINS[chain](pending, *inputs)
        expected = CHAINS[chain](plain(x.to(dtype)), *inputs)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out + 0, expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-5,
                               atol=0.05 if dtype == torch.bfloat16 else 1e-5)  # fmt: skip


def test_the_cast_behind_a_modulation_in_fp32_joins_the_pass(made_of_norms):
    norm, plain = block()
    short, plain = x.bfloat16(), copy.deepcopy(plain).float()
    with torch.no_grad():
        out = (norm(short.float()) * (1 + s) + t).type_as(short)
        expected = (plain(short.float()) * (1 + s) + t).type_as(short)
    assert type(out) is torch.Tensor
    assert made_of_norms == [(True, True, torch.bfloat16)]
    torch.testing.assert_close(out, expected, rtol=0, atol=0.02)


def test_a_modulation_in_16_bits_gives_a_plain_tensor_with_its_rows(made_of_norms):
    norm, _ = block()
    with torch.no_grad():
        made = norm(x.bfloat16()) * (1 + s.bfloat16()) + t.bfloat16()
    assert type(made) is torch.Tensor
    assert made_of_norms == [(True, True, torch.bfloat16)]


def hooked(norm: nn.Module) -> torch.Tensor:
    handle = norm.register_forward_hook(lambda *_: None)
    try:
        return norm(x)
    finally:
        handle.remove()


CALLS_AT_ONCE = {
    "a gradient": lambda norm: norm(x.clone().requires_grad_()),
    "a hook": hooked,
    "inference mode": lambda norm: torch.inference_mode()(norm)(x),
    "autocast": lambda norm: torch.autocast("cpu", dtype=torch.bfloat16)(norm)(x),
    "empty": lambda norm: norm(x[:0]),
}


@pytest.mark.parametrize("case", CALLS_AT_ONCE)
def test_a_norm_is_made_at_once_where_waiting_could_show(case):
    norm, plain = block(torch.float32)
    with torch.set_grad_enabled(case == "a gradient"):
        out, expected = CALLS_AT_ONCE[case](norm), CALLS_AT_ONCE[case](plain)
    assert type(out) is torch.Tensor
    assert torch.equal(out, expected)


def test_an_input_that_is_written_too_early_is_told():
    norm, _ = block(torch.float32)
    with torch.no_grad():
        inputs = x.clone()
        pending = norm(inputs)
        inputs.zero_()
        with pytest.raises(RuntimeError, match="input of a norm was written before"):
            pending.sum()


def test_a_model_that_writes_the_input_first_gets_the_norm_of_what_it_was():
    model = tiny("cogx").module
    plain = copy.deepcopy(model.transformer_blocks[0].norm1.norm)
    sage_plugin.patch(model, **PATCH)
    norm = model.transformer_blocks[0].norm1.norm
    with torch.no_grad():
        norm(x) + 0  # one forward that does not write shows nothing of another that does
        vars(norm).pop("_sage_waits")
        for _ in range(3):
            inputs = x.clone()
            out = norm(inputs)
            inputs.zero_()
            torch.testing.assert_close(out + 0, plain(x))


def test_norms_in_fp32_wait_too_and_copies_are_plain():
    model = tiny("wan").module
    sage_plugin.patch(model, **PATCH)
    norm = model.blocks[0].norm1
    with torch.no_grad():
        norm(x) + 0
        assert type(norm(x)) is PendingNorm
    twin = copy.deepcopy(model).blocks[0].norm1
    assert type(twin) is FP32LayerNorm
    assert vars(twin).keys() == vars(tiny("wan").module.blocks[0].norm1).keys()
    sage_plugin.unpatch(model)
    assert type(norm) is FP32LayerNorm
