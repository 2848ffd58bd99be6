"""A patch that nobody notices: globals and processors of the caller stay his, and are heeded."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import runpy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sage_plugin.plugin import redirect, retarget, twin
from sage_plugin.plugin.patch import patch, unpatch
from tests.plugin import toys
from tests.plugin.toys import ToyAttention, generated, qkv, sage

MODULE = """
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

gain, calls = 1.0, []
total = 0


def count():
    global total
    total += 1


def attend(q, k, v):
    global total
    total += 1
    return gain * F.scaled_dot_product_attention(q, k, v)


class ByMethod:
    def __call__(self, attn, q, k, v):
        global total
        total += 1
        return gain * torch.nn.functional.scaled_dot_product_attention(q, k, v)


class ByHelper:
    def __call__(self, attn, q, k, v):
        return attend(q, k, v)


class ByClosure:
    def __call__(self, attn, q, k, v):
        def inner():
            count()
            return scaled_dot_product_attention(q, k, v)

        return gain * inner()


class F2:
    F = 2.0


class Ambiguous:
    \"\"\"Names the global `F` and attributes of that name, and binds the global.\"\"\"

    F = 1.0

    def __call__(self, attn, q, k, v):
        global F, total
        F = F
        total += 1
        return gain * self.F * F2.F / 2 * F.scaled_dot_product_attention(q, k, v)


class Wide:
    F = 1.0

    def __call__(self, attn, q, k, v):
        global total
        total += 1
        if F2 is None:
            %s
        return gain * self.F * F.scaled_dot_product_attention(q, k, v)


class Full:
    def __call__(self, attn, q, k, v):
        F.pad(q, self.F)
        %s
        return F.scaled_dot_product_attention(q, k, v)
"""  # fmt: skip
MODULE %= (", ".join(f"x{i}" for i in range(200)),) * 2
numbers = itertools.count()
KINDS = ("ByMethod", "ByHelper", "ByClosure", "Ambiguous", "Wide")


@pytest.fixture
def module(monkeypatch):
    """A module whose processors read and write its globals; a compiler keeps modules by name."""
    made = types.ModuleType(f"tests_plugin_globals_{next(numbers)}")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(MODULE, f"{made.__name__}.py", "exec"), vars(made))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_report_127_globals_are_read_and_written_where_they_lie(module, kind):
    layer = ToyAttention(getattr(module, kind)())
    exact = F.scaled_dot_product_attention(*qkv())
    for kernel, error in (("sdpa", 0.0), ("sage", 0.02)):
        handle = patch(layer, kernel=kernel, min_seq=0)
        module.total = 0
        for module.gain in (1.0, 3.0):
            difference = layer(*qkv()) - module.gain * exact
            assert difference.abs().max() <= error * exact.abs().max() * module.gain
        assert module.total == 2
        unpatch(layer)
        assert handle.report().rows[0].calls == {
            "sdpa:host" if kernel == "sdpa" else "sage:emulation": 2
        }


@pytest.mark.parametrize("kind", KINDS)
def test_report_127_a_graph_follows_the_globals_too(module, kind):
    layer = ToyAttention(getattr(module, kind)())
    sage(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for module.gain in (1.0, 3.0):
        eager = layer(*qkv())
        module.total = 0
        torch.testing.assert_close(compiled(*qkv()), eager, rtol=0, atol=1e-6)
        assert module.total == 1
    torch._dynamo.reset()


def test_report_127_the_names_in_place_are_followed(module, monkeypatch):
    layer = ToyAttention(module.ByHelper())
    handle = sage(layer)
    former = layer(*qkv())
    monkeypatch.setattr(module, "attend", lambda q, k, v: q * 0)
    assert layer(*qkv()).abs().max() == 0

    def attend(q, k, v):
        return 2 * F.scaled_dot_product_attention(q, k, v)

    own = types.FunctionType(attend.__code__, vars(module))
    monkeypatch.setattr(module, "attend", own)
    assert torch.equal(layer(*qkv()), 2 * former)  # and runs on the kernel
    assert handle.report().kernel_calls() == 2
    monkeypatch.setattr(module, "F", types.SimpleNamespace(scaled_dot_product_attention=max))
    with pytest.raises(RuntimeError, match="Boolean value"):
        layer(*qkv())


def test_report_127_what_a_processor_sets_on_torch_s_module_is_there(module):
    sage(ToyAttention(module.ByMethod()))
    sage(ToyAttention(module.ByHelper()))
    stand_in = module._sage_plugin_F
    stand_in.sage_test = 2
    assert torch.nn.functional.sage_test == 2
    del stand_in.sage_test
    assert not hasattr(torch.nn.functional, "sage_test")


def test_report_127_only_the_reads_of_attention_are_exchanged(module):
    code = redirect.redirected(module.Ambiguous.__call__).__code__
    assert code.co_names == (*module.Ambiguous.__call__.__code__.co_names, "_sage_plugin_F")
    code = redirect.redirected(module.ByMethod.__call__).__code__
    assert code.co_code == module.ByMethod.__call__.__code__.co_code
    assert "torch" not in code.co_names
    assert retarget.patched_class(module.Full) is None  # and is not patched in part
    own = [name for name in vars(module) if name.startswith("_sage")]
    assert own == ["_sage_plugin_F", "_sage_plugin_torch"]


def test_report_127_a_script_s_own_globals(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sage_plugin\nfrom tests.plugin.toys import ToyAttention, qkv\n"
        + MODULE
        + "layer = ToyAttention(ByMethod())\n"
        "with sage_plugin.patched(layer, kernel='sdpa'):\n"
        "    first = layer(*qkv())\n"
        "    gain = 0.0\n"
        "    second = layer(*qkv())\n"
    )
    left = runpy.run_path(str(script), run_name="__main__")
    assert left["total"] == 2
    assert left["first"].any()
    assert not left["second"].any()


# -- the processor -----------------------------------------------------------------------------


class Gain:
    gain = 1.0

    def __call__(self, attn, q, k, v):
        self.seen = q.shape[2]
        return self.gain * self.attend(q, k, v)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Counting:
    """Writes to its class."""

    count = 0

    def __call__(self, attn, q, k, v):
        type(self).count += 1
        self.note()
        return F.scaled_dot_product_attention(q, k, v)

    @classmethod
    def note(cls):
        cls.noted = cls.count


class GainModule(Gain, nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def attend(self, q, k, v):
        return self.weight * F.scaled_dot_product_attention(q, k, v)


@dataclasses.dataclass(frozen=True)
class Frozen:
    gain: float = 1.0

    def __call__(self, attn, q, k, v):
        return self.gain * F.scaled_dot_product_attention(q, k, v)


class Slots:
    __slots__ = ("gain",)
    __call__ = toys.Direct.__call__


class Final:
    __call__ = toys.Direct.__call__

    def __init_subclass__(cls):
        raise TypeError("is final")


@pytest.mark.parametrize("kind", [Gain, GainModule])
def test_report_128_the_caller_s_processor_and_the_layer_s_have_one_state(kind):
    mine = kind()
    layer, second, plain = (ToyAttention(mine) for _ in range(3))
    model = nn.ModuleList([layer, second])
    with torch.no_grad():
        before = plain(*qkv())
        handle = patch(model, kernel="sdpa")
        mine.gain = 2.0
        assert [torch.equal(x(*qkv()), 2 * before) for x in (layer, second, plain)] == [True] * 3
        assert mine.seen == qkv()[0].shape[2]
        layer.processor.gain, layer.processor.note = 3.0, "kept"
        assert torch.equal(second(*qkv()), 3 * before)
        if kind is GainModule:
            mine.weight = nn.Parameter(torch.tensor(2.0))
            mine.half()
            assert layer.processor.weight is mine.weight
            assert torch.equal(layer(*qkv()), 6 * before)
    assert [row.total_calls() for row in handle.report().rows] == [1 + (kind is GainModule), 2]
    unpatch(model)
    assert layer.processor is second.processor is plain.processor is mine
    assert (mine.gain, mine.note) == (3.0, "kept")
    assert type(mine) is kind
    assert not any("_sage" in name for name in (*vars(mine), *vars(layer)))


@pytest.mark.parametrize("bases", [(), (abc.ABC,)])
def test_report_128_what_a_processor_writes_to_its_class_is_there(bases):
    kind = type("Kind", (Counting, *bases), {})
    layer = ToyAttention(kind())
    sage(layer)
    for _ in range(2):
        layer(*qkv())
    assert (kind.count, kind.noted, Counting.count) == (2, 2, 0)
    assert isinstance(layer.processor, kind)
    unpatch(layer)
    assert type(layer.processor) is kind


def test_report_128_a_processor_of_two_models_is_patched_in_one():
    mine = Gain()
    first, second = ToyAttention(mine), ToyAttention(mine)
    exact = second(*qkv())
    one, other = sage(first), patch(second, kernel="fav2", min_seq=0)
    assert not torch.equal(first(*qkv()), second(*qkv()))
    unpatch(second)
    assert torch.equal(second(*qkv()), exact)
    assert not torch.equal(first(*qkv()), exact)
    assert [handle.report().total_calls() for handle in (one, other)] == [2, 1]


def test_report_128_a_twin_lent_to_another_module_is_its_layer_s():
    layer = ToyAttention(Gain())
    handle = sage(layer)
    exact = Gain()(None, *qkv())
    assert not torch.equal(layer.processor(nn.Identity(), *qkv()), exact)
    assert not torch.equal(layer.processor(attn=layer, q=qkv()[0], k=qkv()[1], v=qkv()[2]), exact)
    assert handle.report().kernel_calls() == 2


@pytest.mark.parametrize(("kind", "words"), [(Slots, "__slots__"), (Final, "no attention call")])
def test_report_135_what_cannot_be_exchanged_is_skipped_and_listed(kind, words):
    mine = kind()
    model = nn.ModuleDict({"mine": ToyAttention(mine), "direct": ToyAttention(toys.Direct())})
    handle = sage(model)
    outputs = [layer(*qkv()) for layer in model.values()]
    assert [row.layer for row in handle.report().rows] == ["model.direct"]
    assert words in handle.report().skipped["model.mine"]
    assert not torch.equal(*outputs)
    assert model["mine"].processor is mine


def test_report_135_a_frozen_processor_is_patched_and_stays_as_it_is():
    mine = Frozen(2.0)
    layer = ToyAttention(mine)
    before = layer(*qkv())
    handle = sage(layer)
    ours = layer(*qkv())
    assert 0 < (ours - before).abs().max() < 0.05
    assert handle.report().kernel_calls() == 1
    assert layer.processor == mine or layer.processor.gain == mine.gain
    unpatch(layer)
    assert layer.processor is mine
    assert generated(layer) == []
    assert vars(mine) == {"gain": 2.0}
    assert twin.generated_class(mine) is None
