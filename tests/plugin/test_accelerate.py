"""`accelerate`: what it does is what `patch` and `compile` do, and all of it is undone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

import sage_plugin
from sage_plugin.errors import UsageError
from sage_plugin.plugin.linears.module import QuantizedLinear
from sage_plugin.plugin.policy.rules import Policy, Rule
from tests.plugin.tiny import tiny

RULES = Policy(
    1,
    (
        Rule("sage", layers=("*attn1",), min_seq=0),
        Rule("int8_row", layers=("*attn1.*", "*ff.net.2"), op="linear"),
    ),
)


@pytest.mark.usefixtures("one_thread")
def test_a_policy_of_both_ops_is_patched_told_and_undone():
    model = tiny("wan")
    plain = model.run()
    acceleration = sage_plugin.accelerate(model.module, policy=RULES, compile=True)
    blocks = list(model.module.blocks)
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert str(acceleration).splitlines() == [
        "transformer (WanTransformer3DModel): 4 attention layers on the policy's rules",
        "  linears: 8 on int8_row; 5 left: embedders stay in 16 bit, 12 left: no rule of the "
        "policy takes it, 1 left: projections into and out of the blocks stay in 16 bit",
        "  compiled at the next forward: 2 WanTransformerBlock",
    ]
    for block in blocks:
        block._compiled_call_impl = None
    ours = model.run()
    other = tiny("wan")
    sage_plugin.patch(other.module, policy=RULES)
    assert torch.equal(other.run(), ours)
    assert not torch.equal(ours, plain)
    acceleration.undo()
    acceleration.undo()
    assert torch.equal(model.run(), plain)
    assert not any(isinstance(m, QuantizedLinear) for m in model.module.modules())


def test_a_mode_of_the_compiler_is_refused():
    with pytest.raises(UsageError, match="compile is 'max-autotune'; give True or False"):
        sage_plugin.accelerate(tiny("cogx").module, compile="max-autotune")


def test_what_was_compiled_before_stays_so():
    model = tiny("cogx")
    first, second = model.module.transformer_blocks
    first.compile(backend="eager")
    before = first._compiled_call_impl
    with sage_plugin.accelerate(model.module, compile=True) as acceleration:
        assert first._compiled_call_impl is before
        assert acceleration.compiled == {"transformer": [second]}
        assert "on a CPU torch's own linear is the fastest" in str(acceleration)
    assert first._compiled_call_impl is before
    assert second._compiled_call_impl is None
