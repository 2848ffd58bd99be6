"""Gluon code of the Hopper kernels: the warps that load tiles by TMA."""

from __future__ import annotations

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import (
    async_load,
    gl,
    gluon,
    mbarrier,
)
from sage_plugin.kernels.attention.backends.hopper.step import next_stage
from sage_plugin.kernels.attention.backends.hopper.tiles import (
    key_blocks,
    piece_of,
    place_of,
    turns_of,
)


@gluon.jit
def load_queries(
    q_desc, memory, of_tiles, shares, q_rows, GROUPS: gl.constexpr, CAUSAL: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """The warp that loads Q: each warpgroup's rows as soon as it is through with those before."""
    q_tiles, q_full, q_empty, _totals, _rings = memory
    phase = 1
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turns, pieces = turns_of(program, programs, shares, SPLIT)
    for turn in range(turns + pieces):
        tile, _low, _high, _piece = piece_of(turn, turns, program, programs, shares, SPLIT)
        bh, _kv, first_row = place_of(tile, of_tiles, GROUPS * 64, CAUSAL)
        for group in gl.static_range(GROUPS):
            row = bh * q_rows + first_row + group * 64
            mbarrier.wait(q_empty.index(group), phase)
            mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
            async_load(q_desc, [row, 0], q_full.index(group), q_tiles.index(group))
        phase ^= 1


@gluon.jit
def load_keys(
    k_desc, v_desc, memory, of_tiles, shares, seq_q, seq_k, k_rows, GROUPS: gl.constexpr,
    DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PV8: gl.constexpr,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The warp that loads K and V: every block into the next empty stages."""
    _q_tiles, _q_full, _q_empty, _totals, rings = memory
    k_tiles, v_tiles, _ones, k_full, k_empty, v_full, v_empty = rings
    stage = 0
    phase = 1
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turns, pieces = turns_of(program, programs, shares, SPLIT)
    for turn in range(turns + pieces):
        tile, low, high, _piece = piece_of(turn, turns, program, programs, shares, SPLIT)
        _bh, kv, first_row = place_of(tile, of_tiles, GROUPS * 64, CAUSAL)
        if CAUSAL:
            high, _whole = key_blocks(first_row, seq_q, seq_k, GROUPS * 64, BN, CAUSAL)
        k_row = kv * k_rows
        for i in range(high - low):
            first_key = (high - 1 - i) * BN
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
