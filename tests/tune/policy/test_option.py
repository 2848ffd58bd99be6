"""Options as text, as rules, and on shapes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_plugin import device
from sage_plugin.errors import UnknownKernelError, UsageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.plugin.policy.rules import Policy, Rule, checked
from sage_plugin.tune.policy.option import Option, default_options
from tests.tune.policy.recordings import SHAPE

CPU = device.facts("cpu")


@given(
    kernel=st.sampled_from(["fav2", "sage", "fav3_sage", "fav3_fp8:emulation"]),
    fields=st.dictionaries(
        st.sampled_from(["hadamard", "q_granule", "block_m"]), st.integers(0, 999_999)
    ),
    smooth=st.none() | st.booleans(),
)
def test_a_label_is_read_back_and_makes_a_sound_rule(kernel, fields, smooth):
    more = {} if smooth is None else {"smooth_v": smooth}
    text = "+".join(
        [kernel, *(f"{k}={str(v).lower()}" for k, v in reversed({**fields, **more}.items()))]
    )
    option = Option.parse(text)
    assert option.fields == {**fields, **more}
    assert option.name == kernel
    assert Option.parse(option.label) == option
    checked(Policy(1, (Rule(option.name, launch=option.fields),)), "the option")


@pytest.mark.parametrize(
    "text", ["int8_row", "fp8_row+rotation=64", "int8_row+rotation=256+smoothing=true"]
)
def test_a_label_of_linears_is_read_back_and_makes_a_sound_rule(text):
    option = Option.parse(text)
    assert (option.label, option.op, option.fields) == (text, "linear", {})
    rule = Rule(option.name, op="linear", rotation=option.rotation, smoothing=option.smoothing)
    assert rule.label == text
    checked(Policy(1, (rule,)), "the option")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int8_row+hadamard=64", "linears have no field 'hadamard'; they have rotation, smoothing"),
        ("int8_row+rotation=24", "rotation is one of 0, 16"),
        ("int8_row+rotation=true", "rotation takes a whole number"),
        ("int8_row+smoothing=1", "smoothing takes true or false"),
    ],
)
def test_what_no_linear_has_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        Option.parse(text)


def test_an_alias_is_the_kernel_that_it_names():
    assert Option.parse("qk_int8+hadamard=32").label == "sage+hadamard=32"


@pytest.mark.parametrize("text", ["flash9", "", "sage:hoppper", "+hadamard=64", "sage "])
def test_unknown_kernels_are_refused(text):
    with pytest.raises(UnknownKernelError):
        Option.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("auto", "by name"),
        ("sdpa", "by name"),
        ("torch", "by name"),
        ("sage+hadamart=64", "no field 'hadamart'"),
        ("sage+", "no field ''"),
        ("sage+hadamard", "hadamard takes a whole number"),
        ("sage+hadamard=", "hadamard takes a whole number"),
        ("sage+hadamard=-64", "hadamard takes a whole number"),
        ("sage+hadamard=²", "hadamard takes a whole number"),
        ("sage+hadamard=1234567", "hadamard takes a whole number"),
        ("sage+hadamard=1e2", "hadamard takes a whole number"),
        ("sage+smooth_v=True", "smooth_v takes true or false"),
        ("sage+smooth_v=1", "smooth_v takes true or false"),
        ("sage+loads=", "loads takes a word"),
    ],
)
def test_unknown_fields_and_values_are_refused(text, says):
    with pytest.raises(UsageError, match=says):
        Option.parse(text)


def wide(head_dim):
    return dataclasses.replace(SHAPE, head_dim=head_dim, dv=head_dim)


def test_by_default_every_kernel_is_tried_and_the_quantized_ones_rotated_too():
    labels = [option.label for option in default_options(CPU, wide(64))]
    kernels = [k for k in dispatch.kernels_of(CPU) if k not in ("sdpa", "torch")]
    rotated = [f"{k}+hadamard=64" for k in kernels if k != "fav2"]
    assert sorted(labels) == sorted(kernels + rotated)
    assert {"sage", "fav3_sage", "fav3_fp8"} <= set(labels)
    assert not any("hadamard" in o.label for o in default_options(CPU, wide(33)))


def test_what_would_run_has_the_fields_of_the_option():
    plain = Option.parse("fav3_sage").runnable(SHAPE, CPU, None)
    changed = Option.parse("fav3_sage+hadamard=16+smooth_v=false").runnable(SHAPE, CPU, None)
    assert changed[0].label == plain[0].label == "fav3_sage:emulation"
    assert changed[1] == dataclasses.replace(plain[1], hadamard=16, smooth_v=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fav3_sage+hadamard=64", "hadamard"),
        ("fav3_sage+loads=carrier_pigeon", "loads"),
        ("fav3_sage+block_m=7", "block_m"),
    ],
)
def test_what_cannot_run_on_a_shape_says_why(text, says):
    reason = Option.parse(text).runnable(SHAPE, CPU, None)
    assert isinstance(reason, str)
    assert says in reason


def test_a_kernel_that_would_fall_back_is_no_option_there():
    wide = dataclasses.replace(SHAPE, head_dim=264, dv=264)
    reason = Option.parse("sage").runnable(wide, CPU, None)
    assert isinstance(reason, str)
    assert "264" in reason
    hopper = Option.parse("fav3_sage:hopper").runnable(SHAPE, CPU, None)
    assert isinstance(hopper, str)
