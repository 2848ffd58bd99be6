"""GELU quantized in the pass that makes it: where nobody else reads it, and not otherwise."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.attention import FeedForward
from torch import nn
from torch._dynamo.testing import CompileCounter

import sage_plugin
from tests.plugin.tiny import tiny

PATCH = {"kernel": "sdpa", "linears": "int8_row", "min_seq": 0}
LABEL = "int8_row:emulation"


def labels(handle) -> set[str]:
    rows = handle.report().linears
    return {label for row in rows if row.layer.endswith("net.2") for label in row.calls}


def apart(model: nn.Module) -> None:
    """A hook that does nothing keeps calls apart."""
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.net[1].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("name", "kind"), [("cogx", "gelu_tanh"), ("wan", "gelu_tanh"), ("flux", "gelu_tanh")]
)
def test_gelu_is_quantized_in_the_pass_that_makes_it(name, kind):
    model, other = tiny(name), tiny(name)
    handle = sage_plugin.patch(model.module, **PATCH)
    out = model.run()
    assert labels(handle) == {f"{LABEL}+{kind}"}
    unfused = sage_plugin.patch(other.module, **PATCH)
    apart(other.module)
    expected = other.run()
    assert labels(unfused) == {LABEL}
    assert (
        float((out - expected).norm() / expected.norm()) < 2e-3
    )  # a value may round the other way
    classes = {type(m) for m in copy.deepcopy(model.module).modules()}
    handle.unpatch()
    assert classes == {type(m) for m in model.module.modules()}
    assert FeedForward in classes
    assert torch.equal(model.run(), tiny(name).run())


CASES = {
    "dropout": lambda ff: ff.train(),
    "hook of GELU": lambda ff: ff.net[0].register_forward_hook(lambda *_: None),
    "hook of the linear": lambda ff: ff.net[2].register_forward_pre_hook(lambda *_: None),
    "own forward": lambda ff: setattr(ff.net[2], "forward", ff.net[2].forward),
    "another linear": lambda ff: ff.net.__setitem__(2, nn.Linear(128, 32)),
    "an argument": lambda ff: None,
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_more_than_gelu_and_a_linear_runs_as_it_is_written(case):
    model = tiny("cogx")
    handle = sage_plugin.patch(model.module, **PATCH)
    ff = model.module.transformer_blocks[0].ff
    plain = copy.deepcopy(ff)
    CASES[case](ff)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        out = ff(x, scale=None) if case == "an argument" else ff(x)
    calls = handle.report().linears[5].calls
    assert calls == ({} if case == "another linear" else {LABEL: 1})
    if case != "another linear":
        with torch.no_grad():
            exact = plain(x)
        assert float((out - exact).norm() / exact.norm()) < 0.02


def test_a_graph_fuses_too_and_a_gradient_takes_all_apart():
    model = tiny("cogx")
    sage_plugin.patch(model.module, **PATCH)
    ff = model.module.transformer_blocks[0].ff
    x = torch.randn(2, 5, 32)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(ff, backend=counter, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), ff(x), rtol=0, atol=1e-3)
    assert counter.frame_count == 1
    plain = copy.deepcopy(ff)
    out, exact = ff(x), plain(x)
    assert torch.equal(out, exact)
    assert out.requires_grad
    torch._dynamo.reset()
