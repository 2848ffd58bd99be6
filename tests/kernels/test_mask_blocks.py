"""Masks of rows and keys, tile by tile: what is found before attention, and what comes out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sage_plugin.kernels.attention.backends.triton.mask_blocks import (
    KEY_TERMS,
    NO_MASK,
    ONE_ROW,
    TILES,
)
from sage_plugin.kernels.attention.backends.triton.mask_blocks import MaskArguments as Arguments
from sage_plugin.kernels.attention.mask import normalized
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.primitives import key_bit
from tests.kernels.calls import EMULATED, QUANTIZED, Shape, draw, launch, relative_l1
from tests.matrix.definition import defined as naive
from tests.matrix.definition import seen_by

pytestmark = pytest.mark.usefixtures("interpreted")

LIMITS = {"fav2": 2e-3, "sage": 0.02, "fav3_sage": 0.09, "fav3_fp8": 0.09}
POSITIONS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": (40, 25)},
    "causal window": {"window": (33, -1), "causal": True},
}


def problem_of(mask, *, causal=False, window=(-1, -1), **more):
    return AttentionParams(0.125, causal, "bhsd", mask=mask, window=window, **more)


def by_tiles(seq_q, seq_k, *, planes=(1, 1), tile=32, seed=0):
    """A bool mask with hidden, plain and mixed tiles, a third each."""
    generator = torch.Generator().manual_seed(seed)
    grid = (*planes, -(-seq_q // tile), -(-seq_k // tile))
    kind = torch.randint(0, 3, grid, generator=generator)
    kind = kind.repeat_interleave(tile, 2).repeat_interleave(tile, 3)[:, :, :seq_q, :seq_k]
    dots = torch.rand(kind.shape, generator=generator) > 0.4
    return (kind == 1) | ((kind == 2) & dots)


def decoded(words, block_n):
    """`(tiles, BM, BN)` bool of the words of some tiles."""
    n = torch.arange(block_n)
    place = n // 2 % 4 * 8 + n // 8 % 4 * 2 + n % 2
    return (words[:, n // 32].transpose(1, 2).long() >> place) & 1 == 1


def assert_classified(mask, seq_q, *, block_m=32, block_n=64, **parts):
    """Lists and bits of a normalised mask are those of torch."""
    problem = problem_of(mask, **parts)
    config = launch(block_m, block_n)
    made = Arguments.of(problem, seq_q=seq_q, launch=config, terms_by_key=True)
    planes, seq_k = mask.shape[0] * mask.shape[1], mask.shape[3]
    rows, keys = -(-seq_q // block_m), -(-seq_k // block_n)
    known = mask if mask.dtype == torch.bool else mask.nan_to_num(neginf=-math.inf)
    known = dataclasses.replace(problem, mask=known)
    seen = seen_by(known, mask.shape[0], mask.shape[1], seq_q, seq_k)
    adds = torch.zeros_like(seen) if mask.dtype == torch.bool else seen & (mask != 0)
    edges = (0, keys * block_n - seq_k, 0, rows * block_m - seq_q)

    def tiled(x):
        x = torch.nn.functional.pad(x.reshape(planes, seq_q, seq_k), edges)
        return x.view(planes, rows, block_m, keys, block_n).transpose(2, 3)

    seen, adds = tiled(seen), tiled(adds).flatten(3).any(3)
    dead = torch.nn.functional.pad(torch.zeros(seq_q, dtype=torch.bool), edges[2:], value=True)
    whole = (seen | dead.view(1, rows, 1, block_m, 1)).flatten(3).all(3)
    some = seen.flatten(3).any(3)
    kinds = (some & whole & ~adds, some & ~whole & ~adds, some & adds)
    lists = made.lists[:-1].view(planes, rows, 4 + 3 * keys)
    word = made.bits.view(planes, rows, keys, max(1, block_n // 32), block_m)
    for plane in range(planes):
        for row in range(rows):
            entry = lists[plane, row]
            for kind, expected in enumerate(kinds):
                found = entry[4 + kind * keys :][: entry[kind]]
                assert found.tolist() == expected[plane, row].nonzero()[:, 0].tolist()
                if kind:
                    assert torch.equal(
                        decoded(word[plane, row, found.long()], block_n),
                        seen[plane, row, found.long()],
                    )
    return [int(x.sum()) for x in kinds]


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(
    ("planes", "seq_q", "seq_k", "block_m", "block_n"),
    [((1, 1), 100, 170, 32, 64), ((2, 3), 33, 64, 32, 32), ((1, 2), 64, 300, 16, 128)],
    ids=str,
)
def test_every_tile_is_of_the_kind_that_its_rows_see(
    positions, planes, seq_q, seq_k, block_m, block_n
):
    mask = by_tiles(seq_q, seq_k, planes=planes, tile=64)
    sizes = {"block_m": block_m, "block_n": block_n}
    plain, mixed, added = assert_classified(mask, seq_q, **sizes, **positions)
    assert mixed > 0 == added
    assert plain > 0 or positions
    bias = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    assert [plain, mixed, 0] == assert_classified(bias, seq_q, **sizes, **positions)
    bias[:, :, 5, ::7] = 1.5
    bias[:, :, -1, -1] = math.nan
    assert assert_classified(bias, seq_q, **sizes, **positions)[2] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_float_mask_hides_under_the_limit_and_adds_all_else(dtype):
    mask = torch.zeros(1, 1, 70, 130, dtype=dtype)
    mask[..., :32, 64:] = torch.finfo(dtype).min
    mask[..., 40, 3] = -0.0
    plain, mixed, added = assert_classified(mask, 70)
    assert (plain, mixed, added) == (5, 2, 2 if dtype == torch.float16 else 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_masks_are_read_in_place_whatever_their_strides(dtype):
    whole = by_tiles(2 * 70, 3 * 130, planes=(2, 2), tile=64).to(dtype)
    for view in (
        whole[:, :, ::2, ::3],
        whole.transpose(2, 3)[:, :, :70, :130],
        whole[:, :1, 3:73, 7:137],
        by_tiles(70, 1).expand(1, 1, 70, 130).to(dtype),
        torch.as_strided(by_tiles(1, 200).to(dtype), (1, 1, 70, 130), (0, 0, 1, 1)),
    ):
        assert_classified(view, 70)
        assert_classified(view.contiguous(), 70)


def test_keys_of_one_accumulator_byte_are_those_of_one_thread():
    bits = [key_bit.fn(n) for n in range(32)]
    assert sorted(bits) == list(range(32))
    for byte in range(4):
        assert [n for n in range(32) if bits[n] // 8 == byte] == [
            8 * group + 2 * byte + odd for group in range(4) for odd in range(2)
        ]


def test_how_each_mask_is_read():
    def mode(form, by_key):
        mask = None if form is None else torch.ones(form, dtype=torch.bool)
        made = Arguments.of(problem_of(mask), seq_q=40, launch=launch(), terms_by_key=by_key)
        return made.mode, made.group, made.planes

    assert mode(None, True) == (NO_MASK, 1, (0, 0))
    assert mode((2, 1, 1, 70), True) == (KEY_TERMS, 1, (0, 0))
    assert mode((2, 1, 1, 70), False) == (ONE_ROW, 1, (0, 0))
    assert mode((1, 4, 1, 70), True) == (ONE_ROW, 1, (0, 0))
    assert mode((1, 1, 40, 70), True) == (TILES, 4, (0, 0))
    assert mode((2, 1, 40, 70), False) == (TILES, 4, (1, 0))
    assert mode((1, 4, 40, 70), True) == (TILES, 1, (0, 1))
    assert mode((2, 4, 40, 70), True) == (TILES, 1, (4, 1))


# -- attention --------------------------------------------------------------------------------

SHAPE = Shape(2, 2, 1, 70, 106, 64)
SMALL = Shape(2, 2, 1, 40, 70, 32)
FORMS = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Two items and two heads: a plane of the mask is found by either, and the interpreter is slow."""


def run(kernel, tensors, problem, **fields):
    if kernel == "fav2":
        fields = {"smooth_k": False, "smooth_v": False} | fields
    built = implementation(kernel, "portable")
    operands = built.prepare(*tensors, problem=problem, launch=launch(32, 32, **fields))
    return built.launch(operands, out_dtype=torch.float32, return_lse=True)


def assert_exact(kernel, tensors, problem, **fields):
    """Output and LSE are those of the definition."""
    out, lse = run(kernel, tensors, problem, **fields)
    exact, exact_lse = naive(*tensors, problem)
    assert relative_l1(out, exact) < LIMITS[kernel]
    dead = torch.isinf(exact_lse)
    assert torch.equal(torch.isinf(lse), dead)
    assert (lse - exact_lse)[~dead].abs().max() < 0.5
    assert (out[dead] == 0).all()
    return out, lse


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_plain_mixed_and_hidden_tiles_give_the_definition(kernel, positions):
    mask = by_tiles(70, 106, planes=(2, 2))
    mask[0, :, 32:64] = False  # a row block of which nobody sees anything
    mask[1, :, 3] = False
    mask[1, 1] = True
    tensors = draw(SHAPE, torch.float16)
    out, lse = assert_exact(kernel, tensors, problem_of(mask, **positions))
    floats = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    same, same_lse = run(kernel, tensors, problem_of(floats, **positions))
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_tiles_that_add_and_tiles_that_do_not_give_the_definition(kernel, positions):
    mask = by_tiles(70, 106, planes=(1, 2))
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    bias[:, :, 20:50, 32:96] += 2 * torch.randn(30, 64, generator=torch.Generator().manual_seed(3))
    tensors = draw(Shape(1, 2, 1, 70, 106, 64))
    for parts in ({}, {"softcap": 6.0, "sinks": torch.linspace(-1, 2, 2)}):
        problem = problem_of(bias, **positions, **parts)
        dropped = naive(*tensors, problem_of(mask, **positions, **parts))[0]
        if parts:
            out, _ = run(kernel, tensors, problem)
            assert relative_l1(out, naive(*tensors, problem)[0]) < LIMITS[kernel]
        else:
            out, _ = assert_exact(kernel, tensors, problem)
        assert relative_l1(out, dropped) > 0.1


@pytest.mark.parametrize("kernel", ["fav2", "fav3_sage"])
@pytest.mark.parametrize("planes", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_for_all_is_a_mask_for_each(kernel, planes, dtype):
    mask = by_tiles(40, 70, planes=planes)
    if dtype != torch.bool:
        mask = torch.randn(mask.shape).masked_fill(~mask, -math.inf)
    tensors = draw(SMALL, torch.float16)
    out, lse = assert_exact(kernel, tensors, problem_of(mask, causal=True))
    full = mask.expand(2, 2, 40, 70)
    turned = full.transpose(2, 3).contiguous().transpose(2, 3)
    padded = torch.zeros(2, 2, 40, 71, dtype=dtype)[..., 1:].copy_(full)
    shrunk = normalized(full, batch=2, heads_q=2, seq_q=40, seq_k=70)
    for other in (full.contiguous(), turned, padded, shrunk):
        again, again_lse = run(kernel, tensors, problem_of(other, causal=True))
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
@pytest.mark.parametrize("add", [False, True], ids=["bool", "bias"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_nan_of_a_key_shows_where_its_tile_is_seen(kernel, which, add, softcap):
    """Rows 0-31 see all of its tile, 32-63 part of it, the rest nothing of it."""
    mask = torch.ones(1, 1, 96, 128, dtype=torch.bool)
    mask[..., 64:, 64:96] = False
    mask[..., 32:64, 64:96] = torch.rand(32, 32, generator=torch.Generator().manual_seed(1)) > 0.5
    sees = mask[0, 0, :, 70].clone()
    assert sees[:32].all()
    assert 8 < sees[32:64].sum() < 24
    assert not sees[64:].any()
    given = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if add else mask
    if add:
        given[..., 1::2, :96] += 0.5
    tensors = list(draw(Shape(1, 2, 2, 96, 128, 64)))
    problem = problem_of(given, softcap=softcap)
    clean, clean_lse = naive(*tensors, problem)
    tensors[which] = tensors[which].clone()
    tensors[which][:, 1, 70, 3] = math.nan
    out, lse = run(kernel, tensors, problem)
    assert torch.equal(out[0, 1].isnan().any(-1), sees)
    assert not out[0, 0].isnan().any()
    assert not lse[:, 0].isnan().any()
    tensors[which][:, 1, 70, 3] = 0.0
    others = ~out.isnan().any(-1)
    assert relative_l1(out[others], clean[others]) < LIMITS[kernel]
    assert (lse - clean_lse)[others].abs().max() < 0.5


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
@pytest.mark.parametrize("add", [False, True], ids=["bool", "bias"])
def test_nan_of_a_key_shows_in_the_heads_that_see_it(kernel, which, add):
    """A mask of one row a head is added key by key."""
    mask = torch.rand(1, 4, 1, 70, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[0, :, 0, 40] = torch.tensor([True, False, False, True])
    given = torch.randn(mask.shape).masked_fill(~mask, -math.inf) if add else mask
    tensors = list(draw(Shape(1, 4, 2, 40, 70, 64)))
    assert_exact(kernel, tensors, problem_of(given))
    tensors[which] = tensors[which].clone()
    tensors[which][:, :, 40, 3] = math.nan
    out, lse = run(kernel, tensors, problem_of(given))
    assert torch.equal(out.isnan().any(-1), mask[:, :, :, 40].expand(1, 4, 40))
    assert not lse[:, 1:3].isnan().any()


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_its_own(kernel, bad):
    mask = by_tiles(70, 106)
    mask[..., 40, :] = False
    q, k, v = draw(Shape(1, 2, 2, 70, 106, 64))
    expected, _ = run(kernel, (q, k, v), problem_of(mask))
    q[:, :, 5], q[:, :, 40] = bad, bad
    out, _ = run(kernel, (q, k, v), problem_of(mask))
    assert out[:, :, 5].isnan().all()
    assert (out[:, :, 40] == 0).all()
    rest = torch.arange(70) != 5
    assert torch.equal(out[:, :, rest], expected[:, :, rest])


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_mask_values_out_of_reach_are_not_added(kernel, bad):
    bias = torch.randn(1, 1, 70, 70, generator=torch.Generator().manual_seed(2))
    tensors = draw(Shape(1, 2, 2, 70, 70, 64))
    expected, _ = assert_exact(kernel, tensors, problem_of(bias, causal=True))
    bias = bias.masked_fill(torch.ones(70, 70).triu(1).bool(), bad)
    out, _ = run(kernel, tensors, problem_of(bias, causal=True))
    assert torch.equal(out, expected)
    bias[..., 50, 7] = math.nan
    out, _ = run(kernel, tensors, problem_of(bias, causal=True))
    assert torch.equal(out.isnan().any(-1), (torch.arange(70) == 50).expand(1, 2, 70))


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_hidden_scores_never_outweigh_and_tiny_ones_are_not_lost(kernel):
    """Scales so small that a product of two is 0, and hidden scores far above all others."""
    q, k, v = draw(Shape(1, 2, 2, 64, 96, 64))
    mask = torch.ones(1, 1, 64, 96, dtype=torch.bool)
    mask[..., ::3] = False
    mask[..., 1, ::3] = True
    k[:, :, ::3] *= 40
    for factor in (1e-25, 1.0):
        tensors = (q * factor, k * factor, v)
        out, _ = run(kernel, tensors, problem_of(mask), smooth_k=False)
        twin = implementation(kernel, "emulation")
        config = launch(32, 32, smooth_k=False)
        operands = twin.prepare(*tensors, problem=problem_of(mask), launch=config)
        expected, _ = twin.launch(operands, out_dtype=torch.float32)
        assert torch.isfinite(out).all()
        assert relative_l1(out, expected) < 5e-4


@pytest.mark.parametrize("kernel", ["fav2", "sage"])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_share_a_mask_may_be_any_number(kernel, causal):
    """They run side by side by fours; every row block of every head is written once."""
    for heads in (1, 5, 7):
        tensors = draw(Shape(1, heads, heads, 40, 70, 32))
        problem = problem_of(by_tiles(40, 70) | (torch.arange(70) == 0), causal=causal)
        assert_exact(kernel, tensors, problem)


@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_every_width_of_a_tile_gives_the_definition(block_n, loads):
    mask = by_tiles(70, 300, tile=128)
    bias = torch.randn(mask.shape).masked_fill(~mask, -math.inf)
    for given in (mask, bias):
        q, k, v = draw(Shape(1, 2, 1, 70, 300, 32))
        problem = problem_of(given)
        built = implementation("fav3_sage", "portable")
        config = launch(64, block_n, loads=loads)
        operands = built.prepare(q, k, v, problem=problem, launch=config)
        out, _ = built.launch(operands, out_dtype=torch.float32, return_lse=True)
        assert relative_l1(out, naive(q, k, v, problem)[0]) < LIMITS["fav3_sage"]
