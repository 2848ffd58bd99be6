"""Which calls skip torch's dispatcher: none in which anything stands between caller and kernel."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sage_plugin
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import api
from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.surroundings import can_bypass_dispatcher
from tests.kernels.calls import Shape, draw

SAGE = Decision("sage", "emulation")
SHAPE = Shape(1, 2, 2, 20, 20, 32)


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    """Keeps the names of the functions that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass without a behaviour of its own."""


def test_plain_tensors_run_directly():
    x = torch.ones(2, 3)
    assert can_bypass_dispatcher(
        x, None, torch.nn.Parameter(x), x.T, x.expand(4, 2, 3), x.bfloat16()
    )
    with torch.no_grad():
        assert can_bypass_dispatcher(x)
    with torch.inference_mode():
        assert can_bypass_dispatcher(x, torch.ones(2))
    assert can_bypass_dispatcher(x, torch.inference_mode()(torch.ones)(2))
    with torch.autocast("cpu"):
        assert can_bypass_dispatcher(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_plain_tensors_of_a_gpu_run_directly():
    x = torch.ones(2, 3, device="cuda", dtype=torch.bfloat16)
    assert can_bypass_dispatcher(x, x.T, torch.nn.Parameter(x))
    with torch.inference_mode(), torch.autocast("cuda"):
        assert can_bypass_dispatcher(x, x + 1)
    assert not can_bypass_dispatcher(torch._neg_view(x))


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, device="meta"),
        torch.ones(2).as_subclass(Own),
        torch._neg_view(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2).to_sparse(),
        torch._efficientzerotensor(2),
        torch.nested.nested_tensor([torch.ones(2)]),
        FakeTensorMode().from_tensor(torch.ones(2)),
    ],
    ids=["meta", "subclass", "negative", "conjugate", "sparse", "zero", "nested", "fake"],
)
def test_a_tensor_with_a_life_of_its_own_does_not(other):
    assert not can_bypass_dispatcher(other)
    assert not can_bypass_dispatcher(torch.ones(2), other)


def test_nothing_runs_directly_under_a_transform_or_a_tracer():
    found = []

    def look(x):
        found.append(can_bypass_dispatcher(x))
        return x + 1

    x = torch.ones(2, 3)
    torch.vmap(look)(x)
    torch.func.functionalize(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.jit.trace(look, (x,), check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(look)(x)
    assert len(found) == 5
    assert not any(found)
    compiled = torch.compile(
        lambda x: x + can_bypass_dispatcher(x), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(x), x)


def test_a_call_runs_directly_where_it_may(monkeypatch):
    q, k, v = draw(SHAPE)
    expected = sage_plugin.attention(q, k, v, kernel="sage")
    monkeypatch.setattr(api, "run_op", lambda *_, **__: pytest.fail("went on to the op"))
    assert torch.equal(sage_plugin.attention(q, k, v, kernel="sage"), expected)
    with pytest.raises(pytest.fail.Exception, match="went on to the op"), FakeTensorMode():
        sage_plugin.attention(q, k, v, kernel="sage")


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_mode_sees_the_op_and_nothing_in_it(return_lse):
    q, k, v = draw(SHAPE)
    expected = sage_plugin.attention(q, k, v, kernel="sage", return_lse=return_lse)
    name = "attention_with_lse" if return_lse else "attention"
    for mode in (Seen(), Watching()):
        with mode:
            out = sage_plugin.attention(q, k, v, kernel="sage", return_lse=return_lse)
        assert torch.equal(out[0], expected[0])
        assert any(f"sage_plugin.{name}" in one for one in mode.names)
        assert not any("empty" in one or "matmul" in one for one in mode.names)


def test_a_profile_has_the_name_of_the_op():
    q, k, v = draw(SHAPE)
    with torch.profiler.profile() as profile:
        sage_plugin.attention(q, k, v, kernel="sage")
    assert "sage_plugin::attention" in {event.key for event in profile.key_averages()}


def test_lazy_negation_is_done_before_a_kernel_reads():
    """The memory of a negative view holds the other sign."""
    q, k, v = draw(SHAPE)
    expected = sage_plugin.attention(-q, k, v, kernel="sage")
    assert torch.equal(sage_plugin.attention(torch._neg_view(q), k, v, kernel="sage"), expected)


def test_an_op_refuses_a_gradient():
    q, k, v = draw(SHAPE)
    call = AttentionCall(q.requires_grad_(), k, v, scale=0.1)
    with pytest.raises(UnsupportedInputError, match="have no backward"):
        api.run_op(SAGE, call, None)
