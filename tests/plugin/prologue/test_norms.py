"""Norms of patched layers: of a class of ours, which nobody else notices and unpatching takes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("diffusers")

from diffusers.models.normalization import FP32LayerNorm, RMSNorm

from sage_plugin.plugin.context import STACK, Frame
from sage_plugin.plugin.patch import patch, unpatch
from sage_plugin.plugin.prologue import eligible
from sage_plugin.plugin.prologue.deferred import is_waiting
from sage_plugin.plugin.prologue.unfused import Unfused
from tests.plugin.tiny import tiny

pytestmark = pytest.mark.usefixtures("everywhere")


@pytest.fixture
def model():
    made = tiny("sd3")
    yield made
    unpatch(made.module)


def norms(module):
    return {n: m for n, m in module.named_modules() if n.endswith(("norm_q", "norm_added_k"))}


def test_unpatching_gives_the_classes_back(model):
    before = {name: type(norm) for name, norm in norms(model.module).items()}
    text = repr(model.module)
    patch(model.module, kernel="fav2", min_seq=0)
    for name, norm in norms(model.module).items():
        assert isinstance(norm, before[name])
        assert type(norm) is not before[name]
    assert repr(model.module) == text
    for copied in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert {name: type(norm) for name, norm in norms(copied).items()} == before
        assert torch.equal(model.run(copied), tiny("sd3").run())
    unpatch(model.module)
    assert {name: type(norm) for name, norm in norms(model.module).items()} == before


def test_a_norm_that_layers_share_is_put_back_with_the_last_of_them(model):
    first, second = (model.module.transformer_blocks[i].attn for i in range(2))
    second.norm_q = first.norm_q
    patch(model.module, kernel="fav2", min_seq=0)
    patch(model.module, kernel="fav2", min_seq=0, include="*blocks.1.attn")
    assert type(first.norm_q) is not RMSNorm
    assert type(first.norm_k) is RMSNorm
    unpatch(model.module)
    assert type(first.norm_q) is RMSNorm


def called(module, x, dtype=None, hook=False, frame=True):
    """What a patched norm gives in a processor of a patched layer, and the reason."""
    layer = nn.ModuleDict({"attn": tiny("sd3").module.transformer_blocks[0].attn})
    layer["attn"].norm_q = module.to(dtype)
    handle = patch(layer, kernel="fav2", min_seq=0)
    if hook:
        module.register_forward_hook(lambda *args: None)
    [context] = handle.layers.values()
    STACK.frames.append(Frame(context if frame else None))
    try:
        with torch.no_grad():
            return module(x), STACK.frames[-1].unfused
    finally:
        STACK.frames.pop()
        unpatch(layer)


KNOWN = {
    "layer": nn.LayerNorm(8),
    "layer_plain": nn.LayerNorm(8, elementwise_affine=False),
    "fp32": FP32LayerNorm(8),
    "rms": nn.RMSNorm(8, eps=1e-6),
    "rms_of_diffusers": RMSNorm(8, eps=1e-6, bias=True),
    "rms_of_diffusers_plain": RMSNorm(8, eps=1e-6, elementwise_affine=False),
}
OTHERS = {
    "default_eps": nn.RMSNorm(8),
    "two_dimensions": nn.LayerNorm((4, 8)),
    "group": nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_norms_are_put_off(name):
    x = torch.randn(1, 4, 6, 8)
    found, reason = called(copy.deepcopy(KNOWN[name]), x)
    assert is_waiting(found)
    assert reason is None
    assert torch.equal(found + 0, KNOWN[name](x))


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms_are_not(name):
    found, reason = called(copy.deepcopy(OTHERS[name]), torch.randn(1, 4, 4, 8))
    assert not is_waiting(found)
    assert reason is (None if name == "group" else Unfused.NORM)


STAY = {
    "weights_in_fp32": ("rms_of_diffusers", {"dtype": torch.float32}, Unfused.NORM),
    "hooks": ("layer", {"hook": True, "dtype": torch.bfloat16}, Unfused.HOOKED),
    "no_layer": ("layer", {"frame": False, "dtype": torch.bfloat16}, None),
    "double": ("layer", {"dtype": torch.float64}, Unfused.DTYPE),
}


@pytest.mark.parametrize("name", STAY)
def test_a_norm_stays_for_a_reason(name):
    norm, how, expected = STAY[name]
    dtype = torch.float64 if name == "double" else torch.bfloat16
    found, reason = called(copy.deepcopy(KNOWN[norm]), torch.randn(1, 4, 6, 8).to(dtype), **how)
    assert not is_waiting(found)
    assert reason is expected


def test_a_gradient_autocast_and_modes_stay(model):
    handle = patch(model.module, kernel="fav2", min_seq=0)
    [row, *_] = handle.report().rows
    model.module(**model.inputs)
    with torch.autocast("cpu"):
        model.run()
    with FlopCounterMode(display=False):
        model.run()
    [row, *_] = handle.report().rows
    assert row.unfused == {Unfused.GRADIENT: 1, Unfused.AUTOCAST: 1, Unfused.DISTURBED: 1}
    assert row.fused == 0


def test_what_a_compiler_leaves_to_python_stays(model, monkeypatch):
    handle = patch(model.module, kernel="fav2", min_seq=0)
    monkeypatch.setattr(eligible, "_callback", lambda: print)
    model.run()
    [row, *_] = handle.report().rows
    assert (row.fused, row.unfused) == (0, {Unfused.COMPILED: 1})
    monkeypatch.setattr(eligible, "_callback", lambda: None)
    model.run()
    assert handle.report().rows[0].fused == 1
