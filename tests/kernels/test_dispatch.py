"""The decision table: which kernel runs where, and the named reason wherever none does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin import device
from sage_plugin.errors import UnknownKernelError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.schema import KERNELS, CallKey, CallShape
from tests.kernels.calls import HOPPER
from tests.kernels.devices import facts

KIB = 2**10
SHAPE = CallShape(2, 32, 32, 4096, 4096, 128, 128, "bfloat16", False, "none", "bhsd", 0.1)
QUANTIZED = ("sage", "fav3_sage", "fav3_fp8")


def decide(arch: str = "sm_90", kernel: str = "auto", **changes: object) -> dispatch.Decision:
    """The decision on `SHAPE`, with fields of the shape or arguments of `decide` changed."""
    fields = {f.name for f in dataclasses.fields(CallShape)}
    shape = dataclasses.replace(SHAPE, **{n: v for n, v in changes.items() if n in fields})
    options = {name: value for name, value in changes.items() if name not in fields}
    return dispatch.decide(shape, facts(arch), kernel=kernel, **options)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("KERNEL", "VARIANT"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setattr(device, "triton_version", lambda: "3.6.0")


# Architecture -> what `auto` takes (or a word of the reason), and the kernels that run by name.
NO_INT8 = "no INT8 tensor product"
ALL = ("fav2", *QUANTIZED)
TABLE = {
    "sm_70": (NO_INT8, ()),
    "sm_75": (NO_INT8, ()),
    "sm_80": ("sage", ("fav2", "sage")),
    "sm_86": ("sage", ("fav2", "sage")),
    "sm_89": ("fav3_sage", ALL),
    "sm_90": ("fav3_sage", ALL),  # as its Hopper variant
    "sm_100": ("fav3_sage", ALL),
    "sm_120": ("fav3_sage", ALL),
    "sm_121": ("fav3_sage", ALL),
    "gfx942": ("fav3_sage", ALL),
    "gfx950": ("fav3_sage", ALL),
    "gfx1100": ("sage", ("fav2", "sage")),
    "gfx1201": ("fav3_sage", ALL),
    "sm_61": ("not a known NVIDIA architecture", ()),
    "sm_999": ("not a known NVIDIA architecture", ()),
    "gfx803": ("not a known AMD architecture", ()),
    "gfx1030": ("not a known AMD architecture", ()),
}


def variant_of(kernel: str, arch: str = "sm_90") -> str:
    """The variant of a plain call of 128 channels."""
    return "hopper" if arch == "sm_90" and kernel in HOPPER else "portable"


@pytest.mark.parametrize("arch", TABLE)
def test_report_106_auto_on_every_architecture(arch):
    expected, named = TABLE[arch]
    found = decide(arch)
    if named:
        assert found == dispatch.Decision(expected, variant_of(expected, arch), None)
    else:
        assert (found.kernel, found.variant) == ("sdpa", "host")
        assert expected in str(found.reason)
        assert arch in str(found.reason)


@pytest.mark.parametrize("arch", TABLE)
@pytest.mark.parametrize("kernel", ALL)
def test_report_106_each_kernel_on_every_architecture(arch, kernel):
    _, named = TABLE[arch]
    found = decide(arch, kernel)
    if kernel in named:
        variant = variant_of(kernel, arch)
        assert found == dispatch.Decision(kernel, variant, None)
        assert found.label == f"{kernel}:{variant}"
        named_too = decide(arch, kernel, variant="portable")
        assert named_too == dispatch.Decision(kernel, "portable", None)
    else:
        assert (found.kernel, found.variant) == ("sdpa", "host")
        assert arch in str(found.reason)


def test_a_cpu_runs_every_kernel_as_its_emulation_and_auto_on_the_host():
    assert dispatch.kernels_of(facts("x86_64")) == KERNELS
    for kernel in ALL:
        assert decide("x86_64", kernel) == dispatch.Decision(kernel, "emulation")
        assert decide("x86_64", kernel, variant="portable").label == f"{kernel}:portable"
    found = decide("x86_64")
    assert (found.kernel, found.variant) == ("sdpa", "host")
    assert found.reason.cause is Fallback.CPU
    assert decide("x86_64", variant="portable").label == "fav3_sage:portable"


@pytest.mark.parametrize("arch", ["sm_70", "gfx1100", "x86_64", "nonsense"])
@pytest.mark.parametrize("kernel", ["torch", "sdpa"])
def test_the_kernels_of_torch_run_everywhere(arch, kernel):
    assert decide(arch, kernel) == dispatch.Decision(kernel, "host")


def test_report_109_hip_is_told_by_its_kind_not_by_a_capability():
    """ROCm reports gfx1151 as capability 11.5: the kind decides, so sm_115 is no HIP device."""
    assert decide("gfx1151").label == "sage:portable"
    assert decide("sm_115").kernel == "sdpa"
    posing = dataclasses.replace(facts("gfx1151"), arch="sm_90")
    assert "not a known AMD architecture" in str(dispatch.decide(SHAPE, posing).reason)


def test_report_110_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(device, "triton_version", lambda: "")
    for arch in ("sm_90", "gfx942"):
        for kernel in ("auto", *ALL):
            assert decide(arch, kernel).reason.cause is Fallback.NO_TRITON
    assert dispatch.kernels_of(facts("sm_90")) == ("torch", "sdpa")
    assert decide("x86_64", "sage").label == "sage:emulation"


@pytest.mark.parametrize("dim", [160, 192, 256])
def test_report_18_large_heads_that_a_kernel_takes(dim):
    assert decide("sm_89", head_dim=dim, dv=dim).kernel == "fav3_sage"
    assert decide("sm_90", "fav3_sage", head_dim=dim, dv=dim).kernel == "fav3_sage"


@pytest.mark.parametrize("dim", [257, 320, 384, 512])
@pytest.mark.parametrize("kernel", ["auto", *ALL])
def test_report_18_larger_heads_fall_back(dim, kernel):
    found = decide(kernel=kernel, head_dim=dim, dv=dim)
    assert found == dispatch.Decision("sdpa", "host", FallbackReason(Fallback.HEAD_DIM, (dim, 256)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dropout": 0.1}, FallbackReason(Fallback.DROPOUT)),
        ({"needs_grad": True}, FallbackReason(Fallback.GRADIENT)),
        ({"dv": 64}, FallbackReason(Fallback.V_CHANNELS, (64, 128))),
        ({"dtype": "float64"}, FallbackReason(Fallback.DTYPE, "float64")),
        ({"dtype": "float8_e4m3fn"}, FallbackReason(Fallback.DTYPE, "float8_e4m3fn")),
        ({"dtype": "int8"}, FallbackReason(Fallback.DTYPE, "int8")),
        ({"seq_q": 0}, FallbackReason(Fallback.EMPTY)),
        ({"seq_k": 0}, FallbackReason(Fallback.EMPTY)),
        ({"batch": 0}, FallbackReason(Fallback.EMPTY)),
        ({"heads_q": 0}, FallbackReason(Fallback.EMPTY)),
        ({"head_dim": 0, "dv": 0}, FallbackReason(Fallback.EMPTY)),
        ({"min_seq": 4097}, FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 4097)),
        ({"min_seq": 100, "seq_q": 99}, FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 100)),
        ({"min_seq": 100, "seq_k": 99}, FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 100)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["auto", *ALL])
def test_a_call_that_no_kernel_takes_has_its_reason(changes, reason, kernel):
    found = decide(kernel=kernel, **changes)
    assert (found.kernel, found.variant) == ("sdpa", "host")
    assert found.reason == reason


@pytest.mark.parametrize("kind", ["key_bias", "dense"])
def test_report_35_every_kernel_takes_masks(kind):
    for kernel in ALL:
        found = decide(kernel=kernel, mask_kind=kind)
        assert found == dispatch.Decision(kernel, "portable")
        shape = dataclasses.replace(SHAPE, mask_kind=kind)
        assert dispatch.call_key(shape, found).mask_kind == kind
    assert decide(mask_kind=kind).label == "fav3_sage:portable"
    assert decide(kernel="torch", mask_kind=kind).reason is None


def test_report_95_a_gradient_always_gives_way_to_the_host():
    for kernel in (*ALL, "torch"):
        assert decide(kernel=kernel, needs_grad=True).reason.cause is Fallback.GRADIENT
    assert decide(kernel="sdpa", needs_grad=True).reason is None


def test_report_61_every_way_to_the_host_but_sdpa_has_a_reason():
    for arch in TABLE:
        for kernel in ("auto", *KERNELS):
            found = decide(arch, kernel)
            assert (found.kernel != "sdpa") == (found.reason is None) or kernel == "sdpa"


@pytest.mark.parametrize("seq", [4096, 1])
def test_a_length_of_at_least_min_seq_is_taken(seq):
    assert decide(kernel="fav3_sage", min_seq=seq, seq_q=seq, seq_k=seq).reason is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtypes_that_are_taken(dtype):
    assert decide(dtype=dtype).reason is None


@pytest.mark.parametrize(
    ("kernel", "variant", "expected"),
    [
        ("fav2", None, "fav2:portable"),
        ("qk_int8", "portable", "sage:portable"),
        ("fav3_fp8", None, "fav3_fp8:hopper"),
        ("fav3_fp8", "portable", "fav3_fp8:portable"),
        (None, "portable", "fav3_sage:portable"),
        ("sdpa", None, "sdpa:host"),
        ("torch", "emulation", "torch:host"),
        ("sdpa", "emulation", "sdpa:host"),
        (None, "emulation", "fav3_sage:emulation"),
        ("fav2", "emulation", "fav2:emulation"),
        ("", "", "fav3_sage:hopper"),
    ],
)
def test_the_environment_stands_in_for_auto(monkeypatch, kernel, variant, expected):
    for name, value in (("KERNEL", kernel), ("VARIANT", variant)):
        if value is not None:
            monkeypatch.setenv(f"SAGE_PLUGIN_{name}", value)
    assert decide().label == expected


def test_an_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_KERNEL", "fav2")
    monkeypatch.setenv("SAGE_PLUGIN_VARIANT", "emulation")
    assert decide(kernel="sage", variant="portable").label == "sage:portable"


def test_the_environment_brings_kernels_to_a_cpu(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_VARIANT", "emulation")
    assert decide("x86_64").label == "fav3_sage:emulation"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("KERNEL", "sage3", "fav3_sage"), ("VARIANT", "cuda", "portable")],
)
def test_a_wrong_environment_is_an_error_that_lists_names(monkeypatch, name, value, allowed):
    monkeypatch.setenv(f"SAGE_PLUGIN_{name}", value)
    with pytest.raises(UnknownKernelError, match=rf"'{value}'.*{allowed}"):
        decide()


def test_an_unknown_kernel_is_answered_with_all_names():
    with pytest.raises(UnknownKernelError) as error:
        dispatch.resolve_kernel("flash")
    for name in ("'flash'", "auto", *KERNELS, "qk_int8 = sage"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sage", ("sage", "auto")),
        ("qk_int8", ("sage", "auto")),
        ("qk_int8:emulation", ("sage", "emulation")),
        ("fav3_fp8:portable", ("fav3_fp8", "portable")),
        ("auto", ("auto", "auto")),
        ("auto:emulation", ("auto", "emulation")),
        ("sdpa", ("sdpa", "host")),
        ("torch:host", ("torch", "host")),
    ],
)
def test_a_kernel_and_its_variant_from_text(text, expected):
    assert dispatch.parse_kernel(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sage:cuda", "'cuda' of kernel 'sage' is not known; choose one of auto, emulation"),
        ("sage:host", "not known"),
        ("sdpa:portable", "choose one of auto, host"),
        ("sage3:portable", "kernel 'sage3' is not known"),
        ("", "kernel '' is not known"),
        ("SAGE", "kernel 'SAGE' is not known"),
    ],
)
def test_wrong_text_is_answered_with_what_is_allowed(text, words):
    with pytest.raises(UnknownKernelError, match=words):
        dispatch.parse_kernel(text)


def test_the_call_key_of_a_grouped_call():
    shape = dataclasses.replace(
        SHAPE, batch=2, heads_q=8, heads_k=2, seq_q=10, seq_k=20, causal=True, layout="bshd"
    )
    key = dispatch.call_key(shape, dispatch.Decision("sage", "portable"))
    assert key == CallKey(
        "sage", "portable", 128, 128, "bfloat16", 4, True, "none", "bshd", 10, 20, 16
    )


def test_facts_of_a_tensors_device():
    assert dispatch.facts_of("cpu", None) == device.facts("cpu")
    x = torch.empty(1)
    assert dispatch.facts_of(x.device.type, x.device.index).kind == "cpu"


# -- the Hopper variants ----------------------------------------------------------------------

NO_TILES = FallbackReason(Fallback.HOPPER_MASK)
NO_SPECIAL = FallbackReason(Fallback.HOPPER_SPECIAL)


def limited(dim):
    return FallbackReason(Fallback.HOPPER_HEAD_DIM, (33, 128, dim))


def elsewhere(arch):
    return FallbackReason(Fallback.HOPPER_ARCHITECTURE, ("sm_90", arch))


LEFT = [  # what the Hopper variant leaves to the portable one, and why
    ({"head_dim": 32, "dv": 32}, limited(32)),
    ({"head_dim": 129, "dv": 129}, limited(129)),
    ({"head_dim": 256, "dv": 256}, limited(256)),
    ({"head_dim": 1, "dv": 1}, limited(1)),
    ({"mask_kind": "dense"}, NO_TILES),
    ({"special": True}, NO_SPECIAL),
    ({"special": True, "mask_kind": "key_bias"}, NO_SPECIAL),
    ({"arch": "sm_100"}, elsewhere("sm_100")),
    ({"arch": "sm_120"}, elsewhere("sm_120")),
    ({"arch": "gfx942"}, elsewhere("gfx942")),
]


def test_the_kernels_with_a_hopper_variant():
    assert {"fav3_sage", "fav3_fp8"} <= set(HOPPER) <= set(QUANTIZED)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize(("changes", "reason"), LEFT, ids=str)
def test_what_the_hopper_variant_leaves_to_the_portable_one(kernel, changes, reason):
    assert decide(kernel=kernel, **changes) == dispatch.Decision(kernel, "portable", None)
    named = decide(kernel=kernel, variant="hopper", **changes)
    assert named == dispatch.Decision("sdpa", "host", reason)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("dim", [33, 40, 64, 65, 80, 96, 128])
@pytest.mark.parametrize("mask_kind", ["none", "key_bias"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["auto", "hopper"])
def test_what_the_hopper_variant_takes(kernel, dim, mask_kind, causal, variant):
    found = decide(
        kernel=kernel, variant=variant, head_dim=dim, dv=dim, mask_kind=mask_kind, causal=causal
    )
    slower = (kernel == "sage" and dim <= 64) or mask_kind != "none"
    expected = "portable" if slower and variant == "auto" else "hopper"
    assert found == dispatch.Decision(kernel, expected, None)


@pytest.mark.parametrize("changes", [{"heads_k": 2}, {"seq_q": 1}, {"seq_k": 1}, {"batch": 9}])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_grouped_heads_lengths_and_dtypes_do_not_matter_to_the_hopper_variant(changes, dtype):
    assert decide(kernel="fav3_sage", dtype=dtype, **changes).label == "fav3_sage:hopper"


def test_a_special_call_of_auto_and_of_another_variant_stays_where_it_was():
    assert decide(special=True).label == "fav3_sage:portable"
    assert decide(special=True, variant="portable").label == "fav3_sage:portable"
    assert decide(special=True, variant="emulation").label == "fav3_sage:emulation"
    assert decide("x86_64", "fav3_sage", special=True).label == "fav3_sage:emulation"
    assert decide("sm_80", special=True).label == "sage:portable"
    assert decide(kernel="sdpa", special=True) == dispatch.Decision("sdpa", "host")
    assert decide(kernel="torch", special=True) == dispatch.Decision("torch", "host")


def test_a_hopper_variant_by_the_environment_is_one_asked_for_by_name(monkeypatch):
    monkeypatch.setenv("SAGE_PLUGIN_VARIANT", "hopper")
    assert decide().label == "fav3_sage:hopper"
    assert decide(special=True) == dispatch.Decision("sdpa", "host", NO_SPECIAL)
    assert decide(variant="portable", special=True).label == "fav3_sage:portable"


def test_a_cpu_has_no_hopper_variant():
    found = decide("x86_64", "fav3_sage", variant="hopper")
    assert (found.kernel, found.variant) == ("sdpa", "host")
    assert found.reason == elsewhere("x86_64")


def test_fav2_has_no_hopper_variant():
    with pytest.raises(UnknownKernelError, match="'hopper' of kernel 'fav2' is not built"):
        decide(kernel="fav2", variant="hopper")
    assert dispatch.parse_kernel("fav3_sage:hopper") == ("fav3_sage", "hopper")


def test_what_no_kernel_takes_is_told_before_what_the_hopper_variant_leaves():
    found = decide(kernel="fav3_sage", variant="hopper", special=True, needs_grad=True)
    assert found.reason.cause is Fallback.GRADIENT
    found = decide("sm_80", "fav3_sage", variant="hopper")
    assert str(found.reason) == "sm_80 has no FP8 matrix units"


def test_a_call_key_names_the_hopper_variant():
    assert dispatch.call_key(SHAPE, decide()).variant == "hopper"
    assert dispatch.call_key(SHAPE, decide(special=True)).variant == "portable"
