"""How programs of the Hopper kernel share tiles, and how pieces of a tile become its output."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from sage_plugin.kernels.attention.backends.hopper import tiles
from sage_plugin.kernels.attention.backends.hopper.combine_kernel import combine_kernel, pieces_of
from sage_plugin.kernels.attention.backends.hopper.config import CombineConfig
from sage_plugin.kernels.attention.backends.hopper.scheduler import (
    StreamKSplit,
    stream_k,
    tile_each,
)

NUMBERS = SimpleNamespace(
    minimum=min, maximum=max, where=lambda condition, yes, no: yes if condition else no
)


def written(function):
    """A Gluon function of numbers alone, as Python."""
    source = inspect.getsource(function.fn)
    scope = {"gl": SimpleNamespace(**vars(NUMBERS), constexpr=None)}
    exec(f"from __future__ import annotations\n{source.split(chr(10), 1)[1]}", scope)
    return scope[function.fn.__name__]


turns_of, piece_of = written(tiles.turns_of), written(tiles.piece_of)


def walked(shares):
    """Tile, first block, block after the last and number of all that programs walk, in order."""
    split = shares.cut > 0
    for program in range(shares.programs):
        turns, pieces = turns_of(program, shares.programs, shares[1:], split)
        for turn in range(turns + pieces):
            yield program, piece_of(turn, turns, program, shares.programs, shares[1:], split)


SHARES = st.builds(
    stream_k,
    tiles=st.integers(1, 700),
    blocks=st.integers(0, 300),
    processors=st.integers(1, 150),
)


@given(SHARES)
def test_every_block_of_every_tile_is_walked_once(shares):
    times = torch.zeros(shares.tiles, shares.blocks, dtype=torch.int32)
    for _, (tile, low, high, piece) in walked(shares):
        assert 0 <= tile < shares.tiles
        assert low < high or shares.blocks == 0
        assert (piece < 0) == (tile < shares.whole)
        times[tile, low:high] += 1
    assert (times == 1).all()


@given(SHARES)
def test_the_pieces_of_a_tile_are_numbered_in_a_row(shares):
    """The kernel that joins them knows no more than the tile and the size of a share."""
    numbers = [(piece, tile) for _, (tile, _, _, piece) in walked(shares) if piece >= 0]
    assert len({piece for piece, _ in numbers}) == len(numbers)
    assert all(piece < shares.pieces for piece, _ in numbers)
    for cut in range(shares.cut):
        first, last = pieces_of.fn(cut, shares.blocks, shares.share)
        found = sorted(piece for piece, tile in numbers if tile == shares.whole + cut)
        assert found == list(range(first, last + 1))


@given(SHARES)
def test_no_program_walks_more_than_the_whole_rounds_and_a_share(shares):
    blocks = [0] * shares.programs
    for program, (_, low, high, _) in walked(shares):
        blocks[program] += high - low
    rounds = -(-shares.whole // shares.programs)
    assert max(blocks) <= rounds * shares.blocks + shares.share


@pytest.mark.parametrize(
    ("tiles", "blocks", "whole", "share"),
    [
        (2064, 129, 1980, 83),  # 24 heads of 16,452: 84 tiles are left
        (1980, 129, 1980, 0),  # 15 full rounds
        (131, 900, 131, 0),  # a round that is nearly full
        (8, 256, 0, 16),  # eight heads of one query
        (8, 6, 8, 0),  # too little to share
        (8, 7, 0, 4),  # no share is smaller
        (88, 16, 88, 0),  # eight heads of 2,048: joining 88 tiles takes longer
        (48, 8, 0, 4),  # eight heads of 1,024
        (1, 0, 1, 0),  # no keys
    ],
)
def test_a_round_is_cut_where_that_shortens_it(tiles, blocks, whole, share):
    made = stream_k(tiles, blocks, 132)
    assert (made.whole, made.share) == (whole, share)
    assert made.programs == (132 if share else min(tiles, 132))


def test_a_program_a_tile():
    assert tile_each(500, 7) == (500, 500, 500, 7, 0)
    assert [found for _, found in walked(tile_each(3, 7))] == [
        (tile, 0, 7, -1) for tile in range(3)
    ]  # fmt: skip


def merged(shares, outs, sums, *, heads, seq, dim, shift=None, dtype=torch.float32):
    """What the kernel makes of pieces, in a `(1, heads, seq, dim)` output of NaN, and the LSE."""
    block_m, width = outs.shape[1:]
    out = torch.full((1, heads, seq, dim), math.nan, dtype=dtype)
    lse = torch.full((1, heads, seq), math.nan)
    rows = 16
    combine_kernel[(shares.cut * block_m // rows,)](
        out, lse, shift, outs, sums, out.stride(), heads, seq,
        shift.shape[1] if shift is not None else 0, -(-seq // block_m), shares.whole,
        shares.blocks, shares.share, seq,
        CONFIG=CombineConfig(dim, width, block_m, rows, LSE=True, SHIFT=shift is not None),
    )  # fmt: skip
    return out, lse


@pytest.fixture
def pieces():
    """Three heads of two tiles of 64 rows; programs share the last two tiles in pieces."""
    shares = StreamKSplit(4, 6, 4, 10, 5)
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(shares.pieces, 64, 32, generator=generator)
    sums = 4 * torch.randn(shares.pieces, 64, generator=generator)
    return shares, outs, sums


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shifted", [False, True])
def test_pieces_count_by_their_sums(pieces, shifted):
    shares, outs, sums = pieces
    sums[2, 3] = -math.inf  # piece 2 and 3 are of the last tile but one, 4 and 5 of the last
    shift = torch.arange(3 * 128.0).reshape(3, 128) if shifted else None
    out, lse = merged(shares, outs, sums, heads=3, seq=100, dim=24, shift=shift)
    assert torch.isnan(out[0, :2]).all()
    assert torch.isnan(lse[0, :2]).all()
    numbers = {tile: [n for _, (t, _, _, n) in walked(shares) if t == tile] for tile in (4, 5)}
    for tile, live in ((4, 64), (5, 36)):
        weights = torch.exp2(sums[numbers[tile], :live].double())
        right = (weights[..., None] * outs[numbers[tile], :live, :24]).sum(0)
        rows = slice((tile - 4) * 64, (tile - 4) * 64 + live)
        torch.testing.assert_close(
            out[0, 2, rows].double(), right / weights.sum(0)[:, None], rtol=1e-5, atol=1e-6
        )
        right_lse = weights.sum(0).log2() + (shift[2, rows] if shifted else 0.0)
        torch.testing.assert_close(
            lse[0, 2, rows].double(), right_lse * math.log(2), rtol=1e-5, atol=1e-5
        )


@pytest.mark.usefixtures("interpreted")
def test_rows_that_saw_no_key_are_zero_and_those_that_are_not_finite_stay_so(pieces):
    shares, outs, sums = pieces
    numbers = [n for _, (tile, _, _, n) in walked(shares) if tile == 4]
    sums[numbers, 7] = -math.inf
    outs[numbers, 7] = 0.0
    sums[numbers[0], 9] = math.nan
    shift = torch.full((3, 128), math.nan)
    shift[2, 8] = 0.0
    out, lse = merged(shares, outs, sums, heads=3, seq=128, dim=32, shift=shift)
    assert (out[0, 2, 7] == 0.0).all()
    assert lse[0, 2, 7] == -math.inf
    assert torch.isnan(out[0, 2, 9]).all()
    assert torch.isnan(lse[0, 2, 9])
    assert torch.isfinite(out[0, 2, 8]).all()
    assert torch.isfinite(lse[0, 2, 8])


@pytest.mark.usefixtures("interpreted")
def test_a_sum_out_of_the_range_of_floats_is_none(pieces):
    """Only differences of sums are powers of two: 2^500 is no float."""
    shares, outs, sums = pieces
    out, lse = merged(shares, outs, sums, heads=3, seq=128, dim=32)
    far, far_lse = merged(shares, outs, sums + 500.0, heads=3, seq=128, dim=32)
    torch.testing.assert_close(far[0, 2], out[0, 2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(far_lse[0, 2], lse[0, 2] + 500 * math.log(2), rtol=1e-5, atol=1e-3)
