"""What is remembered of a call: found again by an equal key, and by no other."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import sage_plugin
from sage_plugin import device
from sage_plugin.errors import ConfigError, UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.attention import dispatch, executor, validate
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest, shape_of
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.kernels.resolver import Resolver
from sage_plugin.registry import load
from tests.kernels.calls import Shape, draw, launch
from tests.registry.samples import entry, merged

PLAIN = Shape(1, 4, 4, 20, 20, 32)


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs, and nothing remembered."""


@pytest.fixture
def made(monkeypatch):
    """The answers that are made."""
    stock, answers = Resolver.anew, []

    def resolve(*arguments):
        answers.append(stock(*arguments))
        return answers[-1]

    monkeypatch.setattr(Resolver, "anew", resolve)
    return answers


def told(answer):
    """What an answer says, whatever object says it."""
    if isinstance(answer, FallbackReason):
        return answer
    return answer.decision, answer.launch, answer.found, answer.key


def attention(*tensors, **options):
    return sage_plugin.attention(*(tensors or draw(PLAIN)), **{"kernel": "sage"} | options)


def rough_configs(folder):
    """A folder with a config for `PLAIN` that leaves out the smoothing."""
    shape = shape_of(*draw(PLAIN), causal=False, scale=1.0, layout="bhsd")
    key = dispatch.call_key(shape, Decision("sage", "emulation"))
    facts = device.facts("cpu")
    rough = entry(key, launch(32, 32, smooth_k=False, smooth_v=False))
    merged(load.file_path(folder, facts.slug), rough, facts=facts)
    return str(folder)


def test_a_second_call_of_a_key_makes_no_plan_and_checks_no_shape(made, monkeypatch):
    first = attention()
    assert [one.decision for one in made] == [Decision("sage", "emulation")]
    monkeypatch.setattr(validate, "check_tensors", lambda *_: pytest.fail("checked again"))
    monkeypatch.setattr(dispatch, "decide", lambda *_, **__: pytest.fail("decided again"))
    monkeypatch.setattr(LaunchRules, "find", lambda *_, **__: pytest.fail("looked up again"))
    assert torch.equal(attention(), first)
    assert len(made) == 1


SPECIAL = {
    "plain": ({}, False),
    "causal": ({"is_causal": True}, False),
    "window": ({"window": (4, 4)}, True),
    "window of everything": ({"window": (-1, -1)}, True),
    "cap": ({"softcap": 3.0}, True),
    "no cap": ({"softcap": 0.0}, False),
    "sinks": ({"sinks": torch.zeros(4)}, True),
    "padding": ({"attn_mask": torch.ones(20, dtype=torch.bool)}, False),
    "bias of keys": ({"attn_mask": torch.zeros(1, 1, 1, 20)}, False),
    "bias of each head": ({"attn_mask": torch.zeros(1, 4, 1, 20)}, True),
    "bias of no head": ({"attn_mask": torch.zeros(1, 1, 1, 20).expand(1, 4, 1, 20)}, False),
}


def packed(**options):
    q, k, v = (torch.randn(12, 2, 32) for _ in range(3))
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    return sage_plugin.attention_varlen(q, k, v, cu, cu, 6, 6, kernel="sage", **options)


def traced(**options):
    with BaseTorchFunctionMode():
        return attention(**options)


def prepared(**options):
    return sage_plugin.prepare(*draw(PLAIN), kernel="sage", **options)


@pytest.mark.parametrize(
    ("entrance", "options", "special"),
    [(door, *row) for door in (attention, traced, prepared) for row in SPECIAL.values()]
    + [(packed, {}, True)],
    ids=lambda x: getattr(x, "__name__", None) or str(x)[:40],
)
def test_the_decision_is_told_what_only_portable_variants_take(
    entrance, options, special, monkeypatch
):
    stock, told = dispatch.decide, []

    def decide(shape, facts, **named):
        told.append(named["special"])
        return stock(shape, facts, **named)

    monkeypatch.setattr(dispatch, "decide", decide)
    entrance(**options)
    assert told[0] == special  # an op decides once more, with the kernel named


def test_other_strides_have_an_answer_of_their_own(made):
    q, k, v = draw(PLAIN)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attention(turned, k, v), attention(q, k, v))
    assert attention(turned, k, v).stride() == turned.stride()
    assert len(made) == 2
    assert told(made[0]) == told(made[1])


OTHERS = {
    "the length of Q": lambda: attention(*draw(Shape(1, 4, 4, 10, 20, 32))),
    "the length of K": lambda: attention(*draw(Shape(1, 4, 4, 20, 30, 32))),
    "heads": lambda: attention(*draw(Shape(1, 4, 2, 20, 20, 32))),
    "batch": lambda: attention(*draw(Shape(2, 4, 4, 20, 20, 32))),
    "head dim": lambda: attention(*draw(Shape(1, 4, 4, 20, 20, 64))),
    "dtype": lambda: attention(*draw(PLAIN, torch.bfloat16)),
    "dtype of V": lambda: attention(*draw(PLAIN)[:2], draw(PLAIN)[2].half()),
    "layout": lambda: attention(layout="bshd"),
    "causal": lambda: attention(is_causal=True),
    "kernel": lambda: attention(kernel="fav2"),
    "variant": lambda: attention(variant="emulation"),
    "launch": lambda: attention(launch=launch(smooth_k=False)),
    "key mask": lambda: attention(attn_mask=torch.ones(1, 20)),
    "dense mask": lambda: attention(attn_mask=torch.ones(20, 20)),
    "expanded mask": lambda: attention(attn_mask=torch.ones(1, 20).expand(20, 20)),
    "auto": lambda: attention(kernel="auto"),
    "scale": lambda: attention(scale=0.7),
    "window": lambda: attention(window=(4, 4)),
    "cap": lambda: attention(softcap=3.0),
    "sinks": lambda: attention(sinks=torch.zeros(4)),
    "dtype of the output": lambda: attention(out_dtype=torch.float64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_decides_is_part_of_the_key(made, name):
    """Each alone, after a plain call: as it is without anything remembered."""
    torch.manual_seed(0)
    fresh = OTHERS[name]()
    (expected,) = made
    launch_config.forget()
    attention()
    torch.manual_seed(0)
    assert torch.equal(OTHERS[name](), fresh)
    assert [told(one) for one in made[1:]] == [told(made[1]), told(expected)]


def test_what_sends_a_call_to_the_host_is_part_of_the_key(made):
    q, k, v = draw(PLAIN)
    wanting = (q.clone().requires_grad_(), k, v)
    options = {"kernel": "auto", "variant": "emulation"}
    attention(q, k, v, **options)
    attention(q, k, v, **options, min_seq=30)
    attention(q, k, v, **options, dropout_p=0.5)
    assert attention(*wanting, **options).requires_grad
    attention(q, k, v, **options)
    assert isinstance(made[0], executor.Executor)
    assert made[1:] == [
        FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 30), FallbackReason(Fallback.DROPOUT),
        FallbackReason(Fallback.GRADIENT),
    ]  # fmt: skip


def test_a_row_of_keys_is_no_dense_mask_whatever_its_shape(made):
    q, k, v = draw(PLAIN)
    row = torch.linspace(-3, 3, 20)[None]
    expected = attention(q, k, v, row)
    launch_config.forget()
    for mask in (row.repeat(20, 1), row.expand(20, 20)):
        torch.testing.assert_close(attention(q, k, v, mask), expected, rtol=0, atol=1e-3)
    assert len(made) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("KERNEL", "fav2"), ("VARIANT", "emulation"), ("LAUNCH", '{"smooth_k": false}')],
)
def test_a_changed_environment_is_seen_at_the_next_call(monkeypatch, made, name, value):
    options = {"kernel": "auto"} if name != "LAUNCH" else {}
    before = attention(**options)
    monkeypatch.setenv(f"SAGE_PLUGIN_{name}", value)
    assert not torch.equal(attention(**options), before)
    monkeypatch.delenv(f"SAGE_PLUGIN_{name}")
    assert torch.equal(attention(**options), before)
    assert len(made) == 2


def test_a_folder_from_the_environment_is_seen_and_follows_the_home(monkeypatch, tmp_path):
    before = attention()
    (tmp_path / "home").mkdir()
    rough_configs(tmp_path / "home" / "configs")
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", "~/configs")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert torch.equal(attention(), before)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert not torch.equal(attention(), before)


def test_a_wrong_environment_is_an_error_at_every_call(monkeypatch):
    attention()
    for _ in range(2):
        monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", "nonsense")
        with pytest.raises(ConfigError, match="SAGE_PLUGIN_LAUNCH: not valid JSON"):
            attention()
        monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", json.dumps({"block_m": 48}))
        with pytest.raises(ConfigError, match="block_m 48"):
            attention()
        monkeypatch.delenv("SAGE_PLUGIN_LAUNCH")
        monkeypatch.setenv("SAGE_PLUGIN_KERNEL", "sage9")
        with pytest.raises(UnknownKernelError, match="sage9"):
            attention(kernel="auto")
        monkeypatch.delenv("SAGE_PLUGIN_KERNEL")


def test_configs_written_since_are_seen_once_all_is_forgotten(tmp_path):
    before = attention(config_dir=str(tmp_path))
    rough_configs(tmp_path)
    assert torch.equal(attention(config_dir=str(tmp_path)), before)
    dispatch.forget()
    after = attention(config_dir=str(tmp_path))
    assert not torch.equal(after, before)
    assert torch.equal(attention(), before)
    prepared = sage_plugin.prepare(*draw(PLAIN), kernel="sage", config_dir=str(tmp_path))
    assert torch.equal(sage_plugin.launch(prepared), after)


def test_the_op_remembers_by_the_same_rules(made, monkeypatch):
    """As compiled code calls it."""
    q, k, v = draw(PLAIN)

    def call(**changes):
        given = {"causal": False, "kernel": "sage", "variant": "emulation", "launch": ""} | changes
        return torch.ops.sage_plugin.attention(
            q, k, v, None, None, 0.1, given["causal"], -1, -1, 0.0, given["kernel"],
            given["variant"], "bhsd", given["launch"], "", None,
        )  # fmt: skip

    first = call()
    assert torch.equal(call(), first)
    assert len(made) == 1
    rough = launch(smooth_k=False).text()
    others = [call(causal=True), call(kernel="fav2"), call(launch=rough)]
    for one, other in itertools.combinations([first, *others], 2):
        assert not torch.equal(one, other)
    assert len(made) == 4
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"smooth_k": false}')
    assert not torch.equal(call(), first)


def test_the_longest_sequences_are_part_of_the_key(made):
    q, k, v = (torch.randn(12, 2, 32) for _ in range(3))
    for ends, longest in (([0, 6, 12], 6), ([0, 6, 12], 7), ([0, 4, 8, 12], 7), ([0, 6, 12], 6)):
        cu = torch.tensor(ends, dtype=torch.int32)
        sage_plugin.attention_varlen(q, k, v, cu, cu, longest, longest, kernel="sage")
    assert len(made) == 3


def test_a_refusal_is_repeated_and_follows_no_equal_number():
    """True equals 1 and hashes like it."""
    attention(window=(1, 1), kernel="sage")
    for _ in range(2):
        with pytest.raises(UnsupportedInputError, match="window"):
            attention(window=(True, 1))
        with pytest.raises(UnsupportedInputError, match="dropout is not supported"):
            attention(dropout_p=0.5)
        with pytest.raises(UnsupportedInputError, match="a gradient is needed"):
            attention(*(x.requires_grad_() for x in draw(PLAIN)))
        with pytest.raises(UnsupportedInputError, match="out_dtype"):
            attention(out_dtype=torch.int8)
        with pytest.raises(UnsupportedInputError, match="one logit a query head"):
            attention(sinks=torch.zeros(3))


def test_an_argument_without_a_hash_has_its_own_sentence():
    with pytest.raises(UnsupportedInputError, match=r"layout \['bhsd'\] is not known"):
        attention(layout=["bhsd"])


def test_the_interpreter_is_asked_for_at_every_call(monkeypatch):
    plain = draw(PLAIN)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked = AttentionCall(*plain), KernelRequest("sage", "portable", launch())
    pytest.importorskip("triton")
    assert executor.resolve(*asked).decision == Decision("sage", "portable")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnsupportedInputError, match="set TRITON_INTERPRET=1"):
        executor.resolve(*asked)


def test_plans_do_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(executor.resolver.answers, "_limit", 3)
    for seq in range(1, 9):
        attention(*draw(Shape(1, 1, 1, seq, seq, 16)))
        assert 1 <= len(executor.resolver.answers) <= 3
