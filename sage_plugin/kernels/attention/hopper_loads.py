"""Gluon code of the Hopper kernels: where tiles lie, and the warps that load them by TMA."""

from __future__ import annotations

from sage_plugin.kernels.attention.gluon_names import async_load, gl, gluon, mbarrier
from sage_plugin.kernels.attention.hopper_step import next_stage


@gluon.jit
def key_blocks(
    first_row, seq_q, seq_k, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """How many key blocks a program sees, and how many of them every one of its rows sees whole."""
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
def load_queries(
    q_desc, memory, of_tiles, tiles, q_rows, GROUPS: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """The warp that loads Q: each warpgroup's rows as soon as it is through with those before."""
    q_tiles, q_full, q_empty, _totals, _rings = memory
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        bh, _kv, first_row = place_of(tile, of_tiles, GROUPS * 64, CAUSAL)
        for group in gl.static_range(GROUPS):
            row = bh * q_rows + first_row + group * 64
            mbarrier.wait(q_empty.index(group), phase)
            mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
            async_load(q_desc, [row, 0], q_full.index(group), q_tiles.index(group))
        phase ^= 1


@gluon.jit
def load_keys(
    k_desc, v_desc, memory, of_tiles, tiles, seq_q, seq_k, k_rows, GROUPS: gl.constexpr,
    DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PV8: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warp that loads K and V: every block into the next empty stages."""
    _q_tiles, _q_full, _q_empty, _totals, rings = memory
    k_tiles, v_tiles, _ones, k_full, k_empty, v_full, v_empty = rings
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _bh, kv, first_row = place_of(tile, of_tiles, GROUPS * 64, CAUSAL)
        blocks, _whole = key_blocks(first_row, seq_q, seq_k, GROUPS * 64, BN, CAUSAL)
        k_row = kv * k_rows
        for i in range(blocks):
            first_key = (blocks - 1 - i) * BN
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            async_load(k_desc, [k_row + first_key, 0], k_full.index(stage), k_tiles.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            if PV8:
                v_at = [kv * DP, first_key]
            else:
                v_at = [k_row + first_key, 0]
            async_load(v_desc, v_at, v_full.index(stage), v_tiles.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
