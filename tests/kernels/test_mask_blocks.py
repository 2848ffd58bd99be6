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
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.primitives import key_bit
from tests.kernels.calls import launch
from tests.matrix.definition import seen_by

pytestmark = pytest.mark.usefixtures("interpreted")

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
