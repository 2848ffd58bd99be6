"""`prepare()` and `launch()`: the same result in two steps, and Q, K and V free in between."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import weakref

import pytest
import torch
import torch.nn.functional as F

import sage_plugin
from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.backends.emulation.quantized import QuantizedEmulation
from sage_plugin.kernels.attention.prepare import Prepared, prepare
from sage_plugin.kernels.attention.prepare import launch as finish
from sage_plugin.kernels.attention.prologue.record import QkNorm
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, draw, launch

EVERY = (*EMULATED, "torch", "sdpa", "auto")
GROUPED = Shape(2, 4, 2, 33, 70, 64)


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.2},
    "mask": {"attn_mask": torch.arange(70) % 3 > 0},
    "all": {
        "attn_mask": torch.linspace(-2, 2, 70),
        "window": (30, 5),
        "softcap": 4.0,
        "sinks": torch.tensor([0.0, 1.0, 2.0, 3.0]),
    },
}


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_two_steps_give_what_one_call_gives(kernel, options, layout):
    tensors = draw(GROUPED, torch.bfloat16, layout=layout)
    given = {**options, "kernel": kernel, "layout": layout}
    prepared = prepare(*tensors, **given)
    out, lse = finish(prepared, return_lse=True)
    expected, expected_lse = attention(*tensors, **given, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert out.stride() == expected.stride()
    assert torch.equal(finish(prepared), out)
    wide = finish(prepared, out_dtype=torch.float32)
    assert torch.equal(
        wide, attention(*tensors, **given, out_dtype=torch.float32, return_lse=True)[0]
    )


@pytest.mark.parametrize("kernel", QUANTIZED)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_q_k_and_v_are_free_after_the_first_step(kernel, options):
    tensors = list(draw(GROUPED))
    expected = attention(*tensors, kernel=kernel, **options)
    prepared = prepare(*tensors, kernel=kernel, **options)
    gone = [weakref.ref(x.untyped_storage()) for x in tensors]
    pointers = [x.untyped_storage().data_ptr() for x in tensors]
    held = {t.untyped_storage().data_ptr() for t in tensors_of(prepared.operands)}
    assert not held & set(pointers)
    for x in tensors:
        x.fill_(float("nan"))
    tensors.clear()
    del x
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert torch.equal(finish(prepared), expected)


def tensors_of(record):
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from tensors_of(value)


@pytest.mark.parametrize("kernel", ["fav2", "torch", "sdpa", "auto"])
def test_kernels_that_read_in_place_keep_their_inputs(kernel):
    q, k, v = draw(GROUPED)
    prepared = prepare(q, k, v, kernel=kernel)
    expected = finish(prepared)
    assert prepared.held_bytes == sum(x.untyped_storage().nbytes() for x in (q, k, v))
    with torch.no_grad():
        v.mul_(2)
    torch.testing.assert_close(finish(prepared), 2 * expected)


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_quantized_operands_are_smaller(kernel):
    tensors = draw(Shape(1, 2, 2, 256, 256, 64))
    held = prepare(*tensors, kernel=kernel).held_bytes
    assert 0 < held < 0.6 * sum(x.nbytes for x in tensors)


def test_the_repr_says_what_it_is():
    prepared = prepare(*draw(GROUPED), kernel="qk_int8")
    megabytes = f"{prepared.held_bytes / 2**20:.1f} MiB held"
    assert repr(prepared) == (
        f"<Prepared sage:emulation for q (2, 4, 33, 64) bhsd on cpu, {megabytes}>"
    )
    assert prepared.held_bytes > 2**16
    assert isinstance(prepared, Prepared)
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.form = None


def test_the_signatures_are_part_of_attentions():
    ours = inspect.signature(prepare).parameters
    theirs = inspect.signature(attention).parameters
    gone = {"dropout_p", "enable_gqa", "return_lse", "out_dtype", "min_seq"}
    assert set(ours) == set(theirs) - gone | {"with_lse"}
    defaults = {n: p.default for n, p in ours.items()}
    assert defaults.pop("with_lse") is True
    assert defaults == {n: theirs[n].default for n in defaults}
    assert {n: p.default for n, p in inspect.signature(finish).parameters.items()} == {
        "prepared": inspect.Parameter.empty, "out_dtype": None, "return_lse": False,
    }  # fmt: skip
    assert sage_plugin.prepare is prepare
    assert sage_plugin.launch is finish


def test_q_and_k_are_normed_and_rotated_first():
    q, k, v = draw(GROUPED, torch.float32)
    angles = torch.randn(q.shape[2], q.shape[3] // 2).repeat_interleave(2, 1)
    parts = {"q_norm": QkNorm("rms", torch.rand(q.shape[3])), "kernel": "sage"}
    if q.shape[2] == k.shape[2]:
        parts["rope"] = (angles.cos(), angles.sin())
    assert torch.equal(finish(prepare(q, k, v, **parts)), attention(q, k, v, **parts))
    assert not torch.equal(finish(prepare(q, k, v, kernel="sage")), attention(q, k, v, **parts))


@pytest.mark.parametrize("kernel", EVERY)
def test_a_call_that_was_prepared_without_the_lse_cannot_give_it(kernel):
    tensors = draw(GROUPED, torch.bfloat16)
    prepared = prepare(*tensors, kernel=kernel, with_lse=False)
    assert torch.equal(finish(prepared), attention(*tensors, kernel=kernel))
    with pytest.raises(UnsupportedInputError, match=r"with_lse=False; prepare it with with_lse=T"):
        finish(prepared, return_lse=True)


@pytest.mark.parametrize("return_lse", [False, True])
def test_one_call_prepares_for_the_lse_where_it_is_asked_for(return_lse, monkeypatch):
    asked = []
    stock = QuantizedEmulation.prepare

    def noted(self, q, k, v, *, problem, launch):
        asked.append(problem.lse)
        return stock(self, q, k, v, problem=problem, launch=launch)

    monkeypatch.setattr(QuantizedEmulation, "prepare", noted)
    attention(*draw(GROUPED), kernel="fav3_sage", variant="emulation", return_lse=return_lse)
    assert asked == [return_lse]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "NHD"}, "'NHD' is not known"),
        ({"attn_mask": torch.ones(3, 3)}, "does not broadcast"),
        ({"window": (1,)}, "two integers"),
        ({"softcap": -2.0}, "softcap is -2.0"),
        ({"sinks": torch.ones(3)}, "one logit a query head"),
        ({"launch": launch(block_n=48)}, "cannot run here: block_n 48"),
    ],
    ids=str,
)
def test_what_attention_refuses_is_refused_in_the_first_step(options, words):
    with pytest.raises(UnsupportedInputError, match=words):
        prepare(*draw(GROUPED), kernel="sage", **options)


def test_unknown_names_and_what_a_kernel_cannot_take_are_refused():
    q, k, v = draw(GROUPED)
    with pytest.raises(UnknownKernelError, match="'flash'"):
        prepare(q, k, v, kernel="flash")
    with pytest.raises(UnsupportedInputError, match="V has 8 channels and Q 64"):
        prepare(q, k, v[..., :8], kernel="sage")
    out = finish(prepare(q, k, v[..., :8]))
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[..., :8]
    )
    with pytest.raises(UnsupportedInputError, match="out_dtype"):
        finish(prepare(q, k, v), out_dtype=torch.int8)


def test_report_95_a_gradient_is_never_lost_in_two_steps():
    q, k, v = (x.requires_grad_() for x in draw(GROUPED))
    with pytest.raises(UnsupportedInputError, match="a gradient is needed"):
        prepare(q, k, v, kernel="sage")
    prepared = prepare(q, k, v)
    with pytest.raises(UnsupportedInputError, match=r"return_lse.*gradient"):
        finish(prepared, return_lse=True)
    finish(prepared).square().sum().backward()
    ours = q.grad.clone()
    q.grad = None
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True).square().sum().backward()
    torch.testing.assert_close(ours, q.grad)
    with torch.no_grad():
        prepared = prepare(q, k, v, kernel="fav2")
    assert not finish(prepared).requires_grad


@pytest.mark.parametrize("kernel", EMULATED)
def test_autocast_does_not_reach_into_either_step(kernel):
    tensors = draw(GROUPED)
    expected = attention(*tensors, kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(finish(prepare(*tensors, kernel=kernel)), expected)


def test_a_launch_config_is_used():
    tensors = draw(GROUPED)
    for config in (launch(), launch(smooth_k=False)):
        prepared = prepare(*tensors, kernel="sage", launch=config)
        assert prepared.operands.launch_config == config
        assert torch.equal(finish(prepared), attention(*tensors, kernel="sage", launch=config))
