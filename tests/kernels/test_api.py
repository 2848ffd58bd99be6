"""`attention()`: SDPA's signature, what it refuses and how it says so, and what it promises."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_plugin
from sage_plugin import device
from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.api import attention, run_op
from sage_plugin.kernels.attention.call import AttentionCall, shape_of
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.contract import Decision
from sage_plugin.registry import load
from tests.kernels.calls import EMULATED, Shape, draw, launch, relative_l1
from tests.registry.samples import entry, merged

NAMED = (*EMULATED, "torch")
PLAIN = Shape(2, 4, 2, 33, 70, 64)


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


# -- the signature ----------------------------------------------------------------------------


def test_report_92_the_first_eight_parameters_are_those_of_sdpa():
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    ours = list(inspect.signature(sage_plugin.attention).parameters.values())
    assert [p.name for p in ours[:3]] == ["q", "k", "v"]
    assert {p.name: p.default for p in ours[3:8]} == {a.name: a.default_value for a in theirs[3:]}
    assert [p.name for p in ours[3:8]] == [a.name for a in theirs[3:]]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in ours[:8])
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[8:])


def test_report_92_they_work_by_position_and_by_name_as_sdpas_do():
    q, k, v = draw(Shape(1, 4, 2, 20, 20, 16))
    mask = torch.rand(20, 20) > 0.3
    for by_position in ((None, 0.0, True), (mask, 0.0, False)):
        expected = F.scaled_dot_product_attention(q, k, v, *by_position, scale=0.3, enable_gqa=True)
        assert torch.equal(attention(q, k, v, *by_position, scale=0.3, enable_gqa=True), expected)
        assert torch.equal(attention(q, k, v, *by_position, 0.3, True), expected)


# -- what it refuses --------------------------------------------------------------------------


def sized(*shapes):
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize("kernel", ["auto", "sage"])
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (sized((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 7, 8)), "do not fit together.*'bhsd'"),
        (sized((1, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)), "do not fit together"),
        (sized((1, 2, 5, 8), (1, 2, 6, 9), (1, 2, 6, 8)), "do not fit together"),
        (sized((1, 4, 5, 8), (1, 4, 6, 8), (1, 2, 6, 8)), "do not fit together"),
        (sized((2, 5, 8), (2, 6, 8), (2, 6, 8)), r"3, 3 and 3 dimensions; each needs 4 \(bhsd\)"),
        (sized((1, 2, 5, 8), (2, 6, 8), (1, 2, 6, 8)), "4, 3 and 4 dimensions"),
        (sized((1, 2, 5, 8), (1, 0, 6, 8), (1, 0, 6, 8)), "2 query heads.*0 key heads"),
        (sized((1, 2, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)), "2 query heads.*4 key heads"),
    ],
)
def test_tensors_that_do_not_fit_are_answered_with_their_shapes(tensors, words, kernel):
    with pytest.raises(UnsupportedInputError, match=words) as error:
        attention(*tensors, kernel=kernel)
    assert error.value.exit_code == 2
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kernel", ["auto", "sage", "sdpa", "torch"])
def test_report_25_heads_that_do_not_divide_are_named(kernel, layout):
    q, k, v = draw(Shape(1, 6, 4, 5, 5, 8), layout=layout)
    with pytest.raises(UnsupportedInputError, match="6 query heads do not divide into 4 key heads"):
        attention(q, k, v, kernel=kernel, layout=layout, enable_gqa=True)


def test_an_unknown_layout_is_answered_with_both():
    with pytest.raises(UnsupportedInputError, match="'NHD' is not known; choose 'bhsd' or 'bshd'"):
        attention(*draw(PLAIN), layout="NHD")


def test_tensors_on_two_devices_are_named():
    q, k, v = draw(PLAIN)
    with pytest.raises(UnsupportedInputError, match="on cpu, meta and cpu; move them"):
        attention(q, k.to("meta"), v)


def test_report_84_a_device_without_kernels_is_left_to_the_host():
    away = [x.to("meta") for x in draw(PLAIN)]
    assert attention(*away).device.type == "meta"
    with pytest.raises(UnsupportedInputError, match="no kernel runs on device type meta"):
        attention(*away, kernel="sage")


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_narrow_inputs_are_refused_whichever_they_are(which, dtype):
    tensors = list(draw(PLAIN))
    tensors[which] = tensors[which].to(dtype)
    with pytest.raises(UnsupportedInputError, match=f"{dtype}.*each needs float16"):
        attention(*tensors, kernel="sage")


@pytest.mark.parametrize("out_dtype", [torch.int8, torch.float8_e4m3fn, "float32"], ids=str)
@pytest.mark.parametrize("kernel", ["auto", "sage"])
def test_report_91_a_wrong_out_dtype_is_refused(out_dtype, kernel):
    with pytest.raises(UnsupportedInputError, match=r"out_dtype.*choose float16"):
        attention(*draw(PLAIN), kernel=kernel, out_dtype=out_dtype)


@pytest.mark.parametrize("kernel", NAMED)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dropout", "dropout is not supported"),
        ("grad", "gradient is needed"),
        ("empty", "the call is empty"),
    ],
)
def test_a_named_kernel_raises_where_auto_would_give_way(kernel, change, words):
    q, k, v = draw(PLAIN)
    options = {}
    if change == "dropout":
        options["dropout_p"] = 0.1
    elif change == "grad":
        v.requires_grad_()
    else:
        k, v = k[:, :, :0], v[:, :, :0]
    with pytest.raises(UnsupportedInputError, match=f"'{kernel}' cannot take.*{words}.*'auto'"):
        attention(q, k, v, kernel=kernel, **options)
    assert attention(q, k, v, **options).shape == q.shape


@pytest.mark.parametrize("kernel", EMULATED)
def test_a_named_kernel_refuses_what_it_was_not_built_for(kernel):
    q, k, v = draw(Shape(1, 1, 1, 5, 5, 264))
    with pytest.raises(UnsupportedInputError, match="head dim 264 is over 256"):
        attention(q, k, v, kernel=kernel)
    with pytest.raises(UnsupportedInputError, match="V has 8 channels and Q 64"):
        attention(q[..., :64], k[..., :64], v[..., :8], kernel=kernel)
    with pytest.raises(UnsupportedInputError, match="dtype float64"):
        attention(*(x[..., :64].double() for x in (q, k, v)), kernel=kernel)


def test_report_95_a_gradient_is_never_lost():
    q, k, v = (x.requires_grad_() for x in draw(PLAIN))
    attention(q, k, v, enable_gqa=True).square().sum().backward()
    ours = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True).square().sum().backward()
    assert all(torch.equal(mine, x.grad) for mine, x in zip(ours, (q, k, v), strict=True))
    with torch.no_grad():
        assert attention(q, k, v, kernel="sage").requires_grad is False
    for kernel in ("auto", "sdpa"):
        with pytest.raises(UnsupportedInputError, match=r"return_lse.*gradient"):
            attention(q, k, v, kernel=kernel, return_lse=True)
        with torch.no_grad():
            assert len(attention(q, k, v, kernel=kernel, return_lse=True)) == 2


def exact_attention(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def by_jvp(function, x, direction):
    return torch.func.jvp(function, (x,), (direction,))[1]


def by_dual_numbers(function, x, direction):
    with forward_ad.dual_level(), torch.no_grad():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


def by_all_directions(function, x, direction):
    return (torch.func.jacfwd(function)(x) * direction).sum((-4, -3, -2, -1))


@pytest.mark.parametrize("way", [by_jvp, by_dual_numbers, by_all_directions])
@pytest.mark.parametrize("place", range(3))
def test_report_130_a_tangent_is_never_lost(way, place):
    inputs = list(draw(Shape(1, 2, 2, 9, 9, 8)))
    x, direction = inputs[place], draw(Shape(1, 2, 2, 9, 9, 8), seed=7)[place]

    def through(function, **options):
        return lambda x: function(*inputs[:place], x, *inputs[place + 1 :], **options)

    expected = by_jvp(through(exact_attention), x, direction)
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no forward derivative
        found = way(through(attention), x, direction)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for kernel in ("sage", "torch"):
        with pytest.raises(UnsupportedInputError, match="a gradient is needed"):
            way(through(attention, kernel=kernel), x, direction)


def test_report_130_inputs_without_a_tangent_run_on_the_kernel():
    q, k, v = draw(PLAIN)
    expected = attention(q, k, v, kernel="sage")
    with forward_ad.dual_level():
        assert torch.equal(attention(q, k, v, kernel="sage"), expected)
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(UnsupportedInputError, match="no backward"):
            run_op(Decision("sage", "emulation"), AttentionCall(dual, k, v), None)


def test_report_130_a_mapped_call_is_a_call_of_each():
    q, k, v = (torch.stack([x, 2 * x]) for x in draw(PLAIN))
    expected = torch.stack([attention(*one, kernel="sage") for one in zip(q, k, v, strict=True)])
    found = torch.func.vmap(lambda *x: attention(*x, kernel="sage"))(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_lse_beside_dropout_is_refused_and_not_made_up():
    q, k, v = draw(PLAIN)
    with pytest.raises(UnsupportedInputError, match="return_lse cannot be had together"):
        attention(q, k, v, return_lse=True, dropout_p=0.5)


def test_unknown_names_raise_for_auto_too():
    q, k, v = draw(PLAIN)
    with pytest.raises(UnknownKernelError, match="'flash'"):
        attention(q, k, v, kernel="flash")
    with pytest.raises(UnknownKernelError, match="'cuda'"):
        attention(q, k, v, variant="cuda")
    with pytest.raises(UnknownKernelError, match=r"'hopper'.*not built in this version"):
        attention(q, k, v, kernel="fav2", variant="hopper")


# -- the host's attention ---------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_on_a_cpu_auto_is_sdpa_bit_for_bit(kernel, causal, dtype):
    q, k, v = draw(Shape(2, 4, 4, 40, 40, 32), dtype)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.equal(attention(q, k, v, is_causal=causal, kernel=kernel), expected)
    seq_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = attention(*seq_first, is_causal=causal, kernel=kernel, layout="bshd")
    assert torch.equal(out.transpose(1, 2), expected)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_report_68_the_lse_of_the_host_is_exact_contiguous_and_fp32(layout):
    q, k, v = draw(PLAIN, torch.bfloat16, layout=layout)
    _, exact = oracle(q, k, v, layout=layout)
    for kernel in ("auto", "sdpa", "torch"):
        out, lse = attention(q, k, v, kernel=kernel, layout=layout, return_lse=True)
        assert torch.equal(lse, exact)
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        assert out.dtype == torch.bfloat16


def test_min_seq_concerns_auto_alone(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_VARIANT", "emulation")
    q, k, v = draw(PLAIN)
    host = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(attention(q, k, v, min_seq=34), host)
    kernel = attention(q, k, v, min_seq=33)
    assert not torch.equal(kernel, host)
    assert torch.equal(attention(q, k, v, kernel="fav3_sage", min_seq=34), kernel)


# -- the promises -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", EMULATED)
def test_the_output_has_the_memory_order_of_q(kernel):
    q, k, v = draw(PLAIN)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert attention(q, k, v, kernel=kernel).stride() == q.stride()
    assert attention(turned, k, v, kernel=kernel).stride() == turned.stride()


@pytest.mark.parametrize("kernel", EMULATED)
def test_report_52_repeated_calls_are_equal_bit_for_bit(kernel):
    tensors = draw(PLAIN, torch.float16)
    first = attention(*tensors, kernel=kernel, is_causal=True)
    for _ in range(5):
        assert torch.equal(attention(*tensors, kernel=kernel, is_causal=True), first)


@pytest.mark.parametrize("kernel", NAMED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_reach_into_a_named_kernel(kernel, dtype):
    tensors = draw(PLAIN)
    plain = attention(*tensors, kernel=kernel)
    with torch.autocast("cpu", dtype):
        assert torch.equal(attention(*tensors, kernel=kernel), plain)
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kernel", EMULATED)
def test_inference_mode_changes_nothing(kernel):
    tensors = draw(PLAIN)
    plain = attention(*tensors, kernel=kernel)
    with torch.inference_mode():
        assert torch.equal(attention(*tensors, kernel=kernel), plain)


def test_an_alias_is_its_kernel():
    tensors = draw(PLAIN)
    assert torch.equal(attention(*tensors, kernel="qk_int8"), attention(*tensors, kernel="sage"))


# -- launch configs ---------------------------------------------------------------------------


def test_a_launch_config_is_checked_before_it_runs():
    tensors = draw(PLAIN)
    with pytest.raises(UnsupportedInputError, match=r'"block_n":48.*cannot run here: block_n 48'):
        attention(*tensors, kernel="sage", launch=launch(block_n=48))
    with pytest.raises(UnsupportedInputError, match="block_n 16 is not a power of two"):
        attention(*tensors, kernel="sage", launch=launch(block_n=16))
    assert attention(*tensors, kernel="fav2", launch=launch(block_n=16)).shape == tensors[0].shape


def test_a_launch_config_is_used():
    tensors = draw(PLAIN)
    smooth, rough = (
        attention(*tensors, kernel="sage", launch=launch(smooth_k=flag)) for flag in (True, False)
    )
    assert not torch.equal(smooth, rough)
    exact, _ = oracle(*tensors)
    assert relative_l1(smooth, exact) < relative_l1(rough, exact)


def test_a_tuned_config_of_a_folder_is_used(tmp_path):
    q, k, v = draw(PLAIN)
    shape = shape_of(q, k, v, causal=False, scale=0.125, layout="bhsd")
    key = dispatch.call_key(shape, Decision("sage", "emulation"))
    rough = launch(128, 128, smooth_k=False, smooth_v=False)
    facts = device.facts("cpu")
    merged(load.file_path(tmp_path, facts.slug), entry(key, rough), facts=facts)
    default = attention(q, k, v, kernel="sage")
    tuned = attention(q, k, v, kernel="sage", config_dir=tmp_path)
    assert torch.equal(tuned, attention(q, k, v, kernel="sage", launch=rough))
    assert not torch.equal(tuned, default)
    assert torch.equal(attention(q, k, v, kernel="sage", config_dir=str(tmp_path)), tuned)


def test_a_decision_can_be_run_as_it_is():
    q, k, v = draw(PLAIN)
    call = AttentionCall(q, k, v, is_causal=True, scale=0.125)
    out = run_op(Decision("sage", "emulation"), call, None)
    assert torch.equal(out, attention(q, k, v, is_causal=True, kernel="sage"))


# -- the portable variant on a CPU ------------------------------------------------------------

PORTABLE = """
import torch, sage_plugin
q = torch.zeros(1, 1, 4, 16)
try:
    sage_plugin.attention(q, q, q, kernel="sage", variant="portable")
except sage_plugin.errors.UnsupportedInputError as error:
    print(error)
"""


def test_a_portable_kernel_on_a_cpu_says_how_to_run_it():
    done = subprocess.run(
        [sys.executable, "-c", "import sage_plugin.errors" + PORTABLE],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in ("sage:portable runs on a GPU", "variant='emulation'", "TRITON_INTERPRET=1"):
        assert words in done.stdout
