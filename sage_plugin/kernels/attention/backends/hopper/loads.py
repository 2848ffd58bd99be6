"""Gluon code of the Hopper kernels: the warps that load tiles by TMA."""

from __future__ import annotations

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import gl, gluon
from sage_plugin.kernels.attention.backends.hopper.pipeline import next_stage
from sage_plugin.kernels.attention.backends.hopper.tiles import (
    key_blocks,
    piece_of,
    place_of,
    turns_of,
)


@gluon.jit
def load_queries(q_desc, memory, of_tiles, split, q_rows, CONFIG: gl.constexpr):
    """The warp that loads Q: each warpgroup's rows as soon as it is through with those before."""
    GROUPS: gl.constexpr = CONFIG.GROUPS
    CAUSAL: gl.constexpr = CONFIG.CAUSAL
    SPLIT: gl.constexpr = CONFIG.SPLIT
    phase = 1
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turns, pieces = turns_of(program, programs, split, SPLIT)
    for turn in range(turns + pieces):
        tile, _low, _high, _piece = piece_of(turn, turns, program, programs, split, SPLIT)
        bh, _kv, first_row = place_of(tile, of_tiles, GROUPS * 64, CAUSAL)
        for group in gl.static_range(GROUPS):
            row = bh * q_rows + first_row + group * 64
            memory.q.reserve(q_desc, group, phase)
            memory.q.load(q_desc, row, 0, group)  # (64, HEAD_DIM)
        phase ^= 1


@gluon.jit
def load_keys(
    k_desc, v_desc, memory, of_tiles, split, seq_q, seq_k, k_rows, CONFIG: gl.constexpr
):  # fmt: skip
    """The warp that loads K and V: every block into the next empty stages."""
    BLOCK_M: gl.constexpr = CONFIG.GROUPS * 64
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    CAUSAL: gl.constexpr = CONFIG.CAUSAL
    SPLIT: gl.constexpr = CONFIG.SPLIT
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    STAGES: gl.constexpr = CONFIG.STAGES
    k = memory.keys()
    v = memory.values()
    stage = 0
    phase = 1
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turns, pieces = turns_of(program, programs, split, SPLIT)
    for turn in range(turns + pieces):
        tile, low, high, _piece = piece_of(turn, turns, program, programs, split, SPLIT)
        _bh, kv, first_row = place_of(tile, of_tiles, BLOCK_M, CAUSAL)
        if CAUSAL:
            high, _whole = key_blocks(first_row, seq_q, seq_k, BLOCK_M, BLOCK_N, CAUSAL)
        k_row = kv * k_rows
        for i in range(high - low):
            first_key = (high - 1 - i) * BLOCK_N
            k.reserve(k_desc, stage, phase)
            k.load(k_desc, k_row + first_key, 0, stage)  # (BLOCK_N, HEAD_DIM)
            v.reserve(v_desc, stage, phase)
            if CONFIG.PV8:
                v.load(v_desc, kv * HEAD_DIM, first_key, stage)  # (HEAD_DIM, BLOCK_N)
            else:
                v.load(v_desc, k_row + first_key, 0, stage)  # (BLOCK_N, HEAD_DIM)
            stage, phase = next_stage(stage, phase, STAGES)
