"""From names to implementations: what exists, what is built once, what a missing Triton says."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from sage_plugin.errors import DeviceError, UnknownKernelError
from sage_plugin.kernels.attention.backends.emulation.quantized import QuantizedEmulation
from sage_plugin.kernels.attention.backends.sdpa import HostKernel
from sage_plugin.kernels.attention.oracle import OracleKernel
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.support import ON_GPUS, TRITON_KERNELS
from sage_plugin.schema import KERNELS, VARIANTS
from tests.kernels.calls import QUANTIZED, Shape, draw, launch

PAIRS = [(kernel, variant) for kernel, variants in TRITON_KERNELS.items() for variant in variants]
RECIPES = {"sage": ("int8", "fp16"), "fav3_sage": ("int8", "fp8"), "fav3_fp8": ("fp8", "fp8")}
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.fixture(autouse=True)
def _fresh():
    implementation.cache_clear()
    yield
    implementation.cache_clear()


def test_every_kernel_has_an_implementation():
    assert {"torch", "sdpa", *TRITON_KERNELS} == set(KERNELS)
    for variants in TRITON_KERNELS.values():
        assert set(variants) <= set(VARIANTS)
        assert "emulation" in variants


@pytest.mark.parametrize(("kernel", "variant"), PAIRS)
def test_each_pair_builds_once_for_each_fp8_type(kernel, variant):
    if variant == "portable":
        pytest.importorskip("triton")
    built = implementation(kernel, variant, E4M3)
    assert implementation(kernel, variant, E4M3) is built
    assert implementation(kernel, variant, FNUZ) is not built
    assert ("Emulation" in type(built).__name__) == (variant == "emulation")


@pytest.mark.parametrize(("kernel", "variant"), [pair for pair in PAIRS if pair[0] in QUANTIZED])
def test_report_111_the_recipe_follows_the_kernel_and_the_devices_fp8_type(kernel, variant):
    if variant == "portable":
        pytest.importorskip("triton")
    for fp8 in (E4M3, FNUZ):
        recipe = implementation(kernel, variant, fp8).recipe
        assert (recipe.qk, recipe.pv) == RECIPES[kernel]
        assert recipe.fp8 == fp8


def test_the_kernels_of_torch_are_on_the_host():
    assert isinstance(implementation("torch", "host"), OracleKernel)
    assert isinstance(implementation("sdpa", "host"), HostKernel)


@pytest.mark.parametrize(
    ("kernel", "variant"),
    [
        ("sage", "host"),
        ("fav2", "hopper"),
        ("sage", "auto"),
        ("torch", "emulation"),
        ("sdpa", "portable"),
        ("qk_int8", "emulation"),
        ("../sage", "emulation"),
    ],
)
def test_a_pair_that_does_not_exist_is_answered_with_those_that_do(kernel, variant):
    with pytest.raises(UnknownKernelError) as error:
        implementation(kernel, variant)
    assert f"{kernel}:{variant} does not exist" in str(error.value)
    for known in ("torch:host", "sdpa:host", *(f"{k}:{v}" for k, v in PAIRS)):
        assert known in str(error.value)


def test_a_missing_triton_is_said_with_its_remedy(monkeypatch):
    implementation.cache_clear()
    home = "sage_plugin.kernels.attention.backends.triton.launch"
    monkeypatch.setitem(sys.modules, home, None)  # as an import that fails
    with pytest.raises(DeviceError, match=r"sage:portable needs Triton.*pip install") as error:
        implementation("sage", "portable")
    assert error.value.exit_code == 3


def test_an_emulation_needs_no_triton(monkeypatch):
    implementation.cache_clear()
    for home in ("triton.launch", "hopper.with_fallback"):
        monkeypatch.setitem(sys.modules, f"sage_plugin.kernels.attention.backends.{home}", None)
    assert type(implementation("sage", "emulation")) is QuantizedEmulation


@pytest.mark.parametrize(
    ("kernel", "variant"), [*(pair for pair in PAIRS if pair[1] == "emulation"), ("torch", "host")]
)
def test_report_11_operands_carry_the_config_that_they_were_made_with(kernel, variant):
    """The attention step reads its blocks from the operands, so they cannot differ."""
    q, k, v = draw(Shape(seq_q=20, seq_k=50, dim=16))
    config = launch(32, 32)
    built = implementation(kernel, variant)
    operands = built.prepare(q, k, v, problem=AttentionParams(0.25, False, "bhsd"), launch=config)
    assert operands.launch_config == (None if variant == "host" else config)
    out, lse = built.launch(operands)
    assert out.shape == q.shape
    assert lse is None


@pytest.mark.parametrize(("kernel", "variant"), [*PAIRS, ("torch", "host"), ("sdpa", "host")])
def test_all_have_the_two_steps_of_the_contract(kernel, variant):
    if variant == "portable":
        pytest.importorskip("triton")
    built = implementation(kernel, variant)
    prepare, run = inspect.signature(built.prepare), inspect.signature(built.launch)
    assert list(prepare.parameters) == ["q", "k", "v", "problem", "launch"]
    assert list(run.parameters) == ["operands", "out_dtype", "return_lse"]
    unmade = getattr(built, "prepare_unmade", None)
    assert (unmade is not None) == (kernel in QUANTIZED and variant in ON_GPUS)
    if unmade is not None:
        assert list(inspect.signature(unmade).parameters) == ["pair", *prepare.parameters]
