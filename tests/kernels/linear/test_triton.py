"""The Triton kernels of linears beside their emulation, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from sage_plugin import device
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.linear import quantizer
from sage_plugin.kernels.linear.api import linear
from sage_plugin.kernels.linear.backends.emulation import LinearEmulation
from sage_plugin.kernels.linear.backends.triton import products, rows
from sage_plugin.kernels.linear.backends.triton.products import multiply_triton
from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton, tiling_of
from sage_plugin.kernels.linear.launch_space import default_launch
from sage_plugin.kernels.linear.rows.prologue import Prologue, prologued
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.kernels.linear.weight import quantize_weight
from sage_plugin.schema import LinearKey, LinearLaunch
from tests.kernels.linear.test_linear import LOSSES, exact, loss

pytestmark = pytest.mark.usefixtures("interpreted", "nan_scratch")

BATCH, SEQ, CHANNELS = 2, 5, 96


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


FORMATS = {
    "fp8_row": {},
    "int8_row": {},
    "fp8_tensor": {},
    "int8_row asymmetric": {"asymmetric": True},
    "int8_row rotated": {"rotation": 32},
}


def form_of(name: str):
    return row_format(name.split()[0], **FORMATS[name])


def prologue_of(kind: str) -> Prologue:
    """Norms with all that they may have."""
    if kind == "swiglu":
        return Prologue(kind, gate=drawn(BATCH, SEQ, 2 * CHANNELS, seed=5)[..., ::2])
    if kind not in ("layer_norm", "rms_norm"):
        return Prologue(kind)
    return Prologue(
        kind,
        weight=drawn(CHANNELS, seed=1),
        bias=drawn(CHANNELS, seed=2) if kind == "layer_norm" else None,
        factor=1 + drawn(BATCH, 1, CHANNELS, seed=3, dtype=torch.bfloat16),
        shift=drawn(BATCH, 2, CHANNELS, seed=4)[:, :1],
    )


def check_rows(made, expected, *, finite=slice(None)) -> None:
    """The same rows but for roundings that are near a half: one step of the type, rarely."""
    torch.testing.assert_close(made.scale, expected.scale, rtol=1e-5, atol=0, equal_nan=True)
    ours, theirs = (one.data.float()[finite].nan_to_num(-1.0) for one in (made, expected))
    differ = ours != theirs
    assert differ.float().mean() <= 0.02
    assert ((ours - theirs).abs() <= 1.0 + 0.126 * theirs.abs()).all()
    if expected.offset is not None:
        torch.testing.assert_close(made.offset[finite], expected.offset[finite])
        assert torch.equal(made.sums, made.data.float().sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", ["none", "gelu", "gelu_tanh", "swiglu", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_the_emulation(name: str, kind: str) -> None:
    x = drawn(BATCH, SEQ, 2 * CHANNELS, dtype=torch.bfloat16)[..., :CHANNELS]
    form, prologue = form_of(name), prologue_of(kind)
    smooth = drawn(CHANNELS, seed=6).abs() + 0.5
    kept, expected_kept = (torch.empty(x.shape, dtype=torch.bfloat16) for _ in range(2))
    made = quantize_rows_triton(x, form, smooth, prologue, kept)
    check_rows(made, quantized_rows(x, form, smooth, prologue, expected_kept).flat())
    torch.testing.assert_close(kept, expected_kept, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_are_zero_constant_huge_or_not_finite(name: str) -> None:
    x = drawn(7, CHANNELS)
    x[0], x[1], x[2] = 0.0, -3.0, x[2] * 1e37
    x[3, 4], x[4, 5], x[5, 6] = math.nan, math.inf, -math.inf
    if name == "fp8_tensor":
        x[2] = 1.0
    form = form_of(name)
    made = quantize_rows_triton(x, form)
    check_rows(made, quantized_rows(x, form), finite=[0, 1, 2, 6])
    bad = made.scale.isnan().flatten() if made.scale.dim() else made.data.float().isnan().all(-1)
    assert bad.tolist() == [False, False, False, True, True, True, False]


@pytest.mark.parametrize("kind", ["none", "gelu_tanh"])
@pytest.mark.parametrize("name", ["fp8_row", "int8_row asymmetric", "fp8_tensor"])
def test_a_row_longer_than_a_tile_is_read_twice(monkeypatch, name: str, kind: str) -> None:
    monkeypatch.setattr(rows, "LARGEST_TILE", 32)
    monkeypatch.setattr(rows, "CHUNK", 32)
    assert tiling_of(CHANNELS).block_k == 32
    x, form = drawn(3, CHANNELS), form_of(name)
    check_rows(quantize_rows_triton(x, form, None, Prologue(kind)),
               quantized_rows(x, form, None, Prologue(kind)))  # fmt: skip


TILES = {7: (16, 0), 64: (64, 0), 65: (64, 16), 96: (64, 32), 100: (128, 0), 128: (128, 0)}


@pytest.mark.parametrize("channels", TILES)
def test_rows_are_one_tile_or_two(channels: int) -> None:
    tile = tiling_of(channels)
    assert (tile.block_k, tile.rest) == TILES[channels]
    x, form = drawn(9, channels), form_of("int8_row asymmetric")
    norm = Prologue("layer_norm", bias=drawn(channels, seed=1))
    check_rows(quantize_rows_triton(x, form, None, norm), quantized_rows(x, form, None, norm))


def test_norms_of_such_rows_are_left_to_torch(monkeypatch) -> None:
    monkeypatch.setattr(rows, "LARGEST_TILE", 32)
    x = drawn(3, CHANNELS)
    made = quantizer.IN_TRITON(x, form_of("fp8_row"), None, Prologue("rms_norm"))
    assert torch.equal(
        made.data.float(),
        quantized_rows(x, form_of("fp8_row"), None, Prologue("rms_norm")).data.float(),
    )


def test_prologues_are_torch_s_own() -> None:
    """The norms and activations that models call, in fp64."""
    x = drawn(BATCH, SEQ, CHANNELS).double()
    norm = prologue_of("layer_norm")
    functional = torch.nn.functional
    expected = {
        "layer_norm": functional.layer_norm(
            x, (CHANNELS,), norm.weight.double(), norm.bias.double(), norm.eps
        ) * norm.factor.double() + norm.shift.double(),
        "rms_norm": functional.rms_norm(x, (CHANNELS,), norm.weight.double(), norm.eps)
        * norm.factor.double() + norm.shift.double(),
        "gelu": functional.gelu(x),
        "gelu_tanh": functional.gelu(x, approximate="tanh"),
        "swiglu": x * functional.silu(prologue_of("swiglu").gate.double()),
    }  # fmt: skip
    for kind, value in expected.items():
        out = prologued(x, prologue_of(kind)).double()
        torch.testing.assert_close(out, value, rtol=1e-5, atol=1e-5, msg=kind)


SMALL = LinearLaunch(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2, group_m=2)
LAUNCHES = {
    "a program a tile": SMALL,
    "programs that take several": SMALL.replaced(programs=1),
    "descriptors": SMALL.replaced(loads="descriptor", programs=1),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", LAUNCHES)
def test_products_are_those_of_the_emulation(monkeypatch, name: str, how: str) -> None:
    monkeypatch.setattr(
        products.device, "facts_of", lambda *_: device.facts("cpu").replaced(sm_count=3)
    )
    form = form_of(name)
    x, weight, bias = drawn(37, CHANNELS), drawn(70, CHANNELS, seed=1), drawn(70, seed=2)
    quantized = quantize_weight(weight, name.split()[0], **FORMATS[name])
    given = quantized_rows(x, form)
    out = multiply_triton(given, quantized, bias, torch.float32, LAUNCHES[how])
    expected = LinearEmulation().multiply(given, quantized, bias, torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    if "asymmetric" not in name:
        low, high = LOSSES[name.split()[0]]
        assert 0.7 * low < loss(out - bias, exact(x, weight)) < high


@pytest.mark.parametrize("channels", [30, 64])
def test_a_tail_of_channels_adds_nothing(channels: int) -> None:
    x, weight = drawn(5, channels), drawn(9, channels, seed=1)
    quantized = quantize_weight(weight, "int8_row")
    given = quantized_rows(x, form_of("int8_row"))
    out = multiply_triton(given, quantized, None, torch.float32, SMALL)
    assert torch.equal(out, LinearEmulation().multiply(given, quantized, None, torch.float32))


def test_the_backend_runs_by_name_and_its_launch_config_is_checked() -> None:
    x, weight = drawn(2, 3, 64, dtype=torch.bfloat16), drawn(32, 64, seed=1)
    quantized = quantize_weight(weight, "int8_row")
    out = linear(x, quantized, backend="triton", launch=SMALL)
    assert torch.equal(out, linear(x, quantized, backend="emulation"))
    with pytest.raises(UnsupportedInputError, match="block_m 48"):
        linear(x, quantized, backend="triton", launch=SMALL.replaced(block_m=48))


def test_a_quantizer_that_cannot_be_built_leaves_its_work_to_torch(monkeypatch, caplog) -> None:
    def fails(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(rows, "quantize_rows_triton", fails)
    quantize = quantizer.RowQuantizer(by_torch=False)
    x = drawn(3, CHANNELS)
    assert torch.equal(
        quantize(x, form_of("int8_row")).data, quantized_rows(x, form_of("int8_row")).data
    )
    assert quantize.by_torch
    assert "rows are quantized by torch" in caplog.text


def test_a_product_that_cannot_be_built_leaves_its_work_to_torch(monkeypatch, caplog) -> None:
    def fails(*_):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(products, "multiply_triton", fails)
    given = quantized_rows(drawn(3, CHANNELS), form_of("int8_row"))
    weight = quantize_weight(drawn(16, CHANNELS, seed=1), "int8_row")
    multiply = products.TritonProducts(SMALL).multiply
    out = multiply(given, weight, None, torch.float32)
    assert torch.equal(out, LinearEmulation().multiply(given, weight, None, torch.float32))
    assert "torch multiplies linears" in caplog.text
    monkeypatch.setattr(products, "multiply_triton", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        products.TritonProducts(SMALL).multiply(given, weight, None, torch.float32)


def test_numbers_of_channels_may_lie_apart() -> None:
    x, form = drawn(3, CHANNELS), form_of("int8_row")
    apart = drawn(2 * CHANNELS, seed=3)[::2]
    norm = Prologue("layer_norm", weight=apart, bias=apart)
    check_rows(quantize_rows_triton(x, form, None, norm), quantized_rows(x, form, None, norm))
    given, weight = quantized_rows(x, form), quantize_weight(drawn(CHANNELS, CHANNELS), "int8_row")
    out = multiply_triton(given, weight, apart, torch.float32, SMALL)
    torch.testing.assert_close(out, LinearEmulation().multiply(given, weight, apart, torch.float32))


def test_the_emulation_has_a_launch_config_too() -> None:
    key = LinearKey("int8_row", "triton", 24, 32, "bfloat16", 5)
    assert default_launch(key, device.facts("cpu")).loads == "pointer"
