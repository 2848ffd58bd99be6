"""Adapters around patched linears: the base multiplies 8 bits, the adapters are exact."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import peft
from torch import nn

import sage_plugin
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.linears.module import QuantizedLinear
from tests.plugin.tiny import Tiny, tiny

PATCH = {"kernel": "sdpa", "linears": "int8_row", "min_seq": 0}


def adapter(**options) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["to_q", "to_out.0", "net.2"], init_lora_weights=False,
        **options,
    )  # fmt: skip


def add(model: Tiny, name: str, seed: int, **options) -> None:
    torch.manual_seed(seed)
    model.module.add_adapter(adapter(**options), name)


def first_query(model: Tiny) -> nn.Module:
    return model.module.transformer_blocks[0].attn1.to_q


def close(model: Tiny, exact: torch.Tensor) -> bool:
    """Whether an output is that of the same adapters around 16-bit linears, but for 8 bits."""
    out = model.run()
    return 1e-6 < float((out - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_adapters_are_exact_around_a_base_of_8_bits(first):
    model, plain = tiny("cogx"), tiny("cogx")
    bare = plain.run()
    if first == "patch":
        handle = sage_plugin.patch(model.module, **PATCH)
    for one in (model, plain):
        add(one, "a", 1)
    if first == "adapter":
        handle = sage_plugin.patch(model.module, **PATCH)
    exact = plain.run()
    assert not torch.allclose(exact, bare, rtol=0.02)
    assert close(model, exact)
    query = first_query(model)
    assert type(query.base_layer) is QuantizedLinear
    assert type(query.lora_A["a"]) is nn.Linear
    x = torch.randn(5, 32)
    with torch.no_grad():
        added = query(x) - query.base_layer(x)
        torch.testing.assert_close(added, query.lora_B["a"](query.lora_A["a"](x)) * 2)
    assert len(handle.report().linears) == 12
    handle.unpatch()
    assert torch.equal(model.run(), exact)


def test_adapters_are_switched_fused_and_taken_off_while_patched():
    model, plain = tiny("cogx"), tiny("cogx")
    handle = sage_plugin.patch(model.module, **PATCH)
    bare = plain.run()
    ours = model.run()

    def both(do):
        for one in (model, plain):
            do(one.module)
        return close(model, plain.run())

    for one in (model, plain):
        add(one, "a", 1)
        add(one, "b", 2)
    assert both(lambda m: m.set_adapters(["a"], weights=[0.5]))
    assert both(lambda m: m.set_adapters(["a", "b"], weights=[1.0, -0.5]))
    assert both(lambda m: m.disable_adapters())
    assert torch.equal(model.run(), ours)
    assert both(lambda m: (m.enable_adapters(), m.fuse_lora()))
    fused = model.run()
    base, exact = (first_query(m).base_layer for m in (model, plain))
    assert torch.equal(base.weight, exact.weight)
    assert both(lambda m: m.unfuse_lora())
    assert not torch.equal(model.run(), fused)
    assert torch.equal(base.weight, exact.weight)
    assert both(lambda m: m.delete_adapters(["a"]))
    assert both(lambda m: m.unload_lora())
    assert type(first_query(model)) is QuantizedLinear
    handle.unpatch()
    assert torch.equal(model.run(), plain.run())
    torch.testing.assert_close(model.run(), bare, rtol=0, atol=1e-4)


def test_an_adapter_that_needs_the_weight_itself_leaves_its_linear_alone():
    model, plain = tiny("cogx"), tiny("cogx")
    handle = sage_plugin.patch(model.module, **PATCH)
    for one in (model, plain):
        add(one, "a", 1, use_dora=True)
    exact = plain.run()
    for _ in range(4):
        assert close(model, exact)
    reads = FallbackReason(Fallback.LINEAR_READ)
    read = {row.layer for row in handle.report().linears if reads in row.fallbacks}
    assert len(read) == 6
    assert all(name.rsplit(".", 1)[1] in ("to_q", "0", "2") for name in read)


def test_a_rank_may_be_hot_swapped():
    model, plain = tiny("cogx"), tiny("cogx")
    handle = sage_plugin.patch(model.module, **PATCH)
    for one in (model, plain):
        add(one, "a", 1)
    model.run()
    torch.manual_seed(3)
    names = [n for n, _ in plain.module.named_parameters() if "lora_" in n]
    new = {name: torch.randn_like(plain.module.get_parameter(name)) * 0.1 for name in names}
    for one in (model, plain):
        for name in names:
            one.module.get_parameter(name).data.copy_(new[name])
    assert close(model, plain.run())
    assert all(not row.fallbacks for row in handle.report().linears)
