"""Gluon code of the Hopper kernels: which tiles a program walks, and which of their key blocks.

Programs that share tiles take whole ones in turn. Where `SPLIT` is set the last round, which would
not be full, is split as in Stream-K: equally many key blocks a program, a piece of one tile or of
two that follow each other. Pieces are numbered by program plus tile, which no two share.
"""

from __future__ import annotations

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import gl, gluon


@gluon.jit
def key_blocks(
    first_row, seq_q, seq_k, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """How many key blocks a tile sees, and how many of them every one of its rows sees whole."""
    high = seq_k
    whole = seq_k
    if CAUSAL:
        high = gl.maximum(gl.minimum(seq_k, first_row + BM + seq_k - seq_q), 0)
        whole = gl.maximum(gl.minimum(seq_k, first_row + 1 + seq_k - seq_q), 0)
    return (high + BN - 1) // BN, whole // BN


@gluon.jit
def place_of(tile, of_tiles, BM: gl.constexpr, CAUSAL: gl.constexpr):
    """Where a tile of queries lies: its head, its key head and its first row."""
    row_blocks, heads_q, ratio = of_tiles
    block = tile % row_blocks
    if CAUSAL:
        block = row_blocks - 1 - block
    bh = tile // row_blocks
    kv = (bh // heads_q) * (heads_q // ratio) + (bh % heads_q) // ratio
    return bh, kv, block * BM


@gluon.jit
def turns_of(program, programs, split, SPLIT: gl.constexpr):
    """How many whole tiles a program walks, and how many pieces after them.

    Args:
        program: its number.
        programs: how many there are.
        split: tiles, how many of them are walked whole, key blocks of a tile, and of a share.
        SPLIT: whether there are shares.
    """
    tiles, whole, blocks, share = split
    turns = (whole - program + programs - 1) // programs
    pieces = 0
    if SPLIT:
        begin = program * share
        end = gl.minimum(begin + share, (tiles - whole) * blocks)
        last = gl.maximum(end - 1, 0) // blocks
        pieces = gl.where(begin < end, last - begin // blocks + 1, 0)
    return turns, pieces


@gluon.jit
def piece_of(turn, turns, program, programs, split, SPLIT: gl.constexpr):
    """What a program walks in a turn: a tile, from which key block to which, the piece's number.

    Without `SPLIT`, and for whole tiles, the number is -1 and the blocks are all of a tile's.
    """
    tiles, whole, blocks, share = split
    tile = program + turn * programs
    low = 0
    high = blocks
    piece = -1
    if SPLIT:
        begin = program * share
        end = gl.minimum(begin + share, (tiles - whole) * blocks)
        first = begin // blocks + (turn - turns)
        in_piece = turn >= turns
        tile = gl.where(in_piece, whole + first, tile)
        low = gl.where(in_piece, gl.maximum(begin - first * blocks, 0), 0)
        high = gl.where(in_piece, gl.minimum(end - first * blocks, blocks), blocks)
        piece = gl.where(in_piece, program + first, -1)
    return tile, low, high, piece
