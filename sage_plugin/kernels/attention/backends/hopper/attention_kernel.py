"""The Hopper attention kernel in Gluon: two warps load, two or three warpgroups multiply.

A program takes tiles of queries, 64 rows for each of its warpgroups: one, or one after another. It
walks the key blocks that any of a tile's rows sees, from the last to the first, so that the blocks
that need comparisons come first. K and V come through two rings in shared memory, each stage with a
"full" and an "empty" barrier; they run on from tile to tile. Row sums are a product of the rounded
weights with ones, or of fp16 weights fp32 sums of each thread. Where K was smoothed and every row
sees every key, scores sum to zero, so that maxima start at zero and FP8 products compare as
integers. With `FLUSH` the tensor cores' accumulator is added to an fp32 one in shared memory every
`FLUSH` blocks, since tensor cores truncate as they add; heads whose V does not drift along the
sequence are flushed an eighth as often.
"""

from __future__ import annotations

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma_wait,
)
from sage_plugin.kernels.attention.backends.hopper.loads import load_keys, load_queries
from sage_plugin.kernels.attention.backends.hopper.pipeline import Memory, QueryTile, new_ring
from sage_plugin.kernels.attention.backends.hopper.running_max import (
    OFFSET,
    in_lanes,
    rescaled,
    spread,
)
from sage_plugin.kernels.attention.backends.hopper.step import (
    pv_delayed_step,
    scores,
    step,
    values,
)
from sage_plugin.kernels.attention.backends.hopper.tiles import (
    key_blocks,
    piece_of,
    place_of,
    turns_of,
)

LOWEST = gl.constexpr(-3e38)
LN2 = gl.constexpr(0.6931471805599453)
STEADY = gl.constexpr(8)
"""How many times rarer totals are flushed where values do not drift along the sequence."""


@gluon.jit
def _shared_order(acc, DP: gl.constexpr):
    """An accumulator with its channels in an order that gives a thread four in a row."""
    return acc.reshape([64, DP // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, DP])


@gluon.jit
def _segment(drifts, whole, FLUSH: gl.constexpr, PV8: gl.constexpr):
    """Blocks between two flushes: `FLUSH` where V drifts, more where it does not, or all."""
    if FLUSH == 0:
        return gl.maximum(whole, 1)
    elif PV8:
        return gl.where(gl.load(drifts) != 0, FLUSH, FLUSH * STEADY)
    else:
        return gl.maximum(whole * 0 + FLUSH, 1)


@gluon.jit
def _flush(total, acc, m, m_total, DP: gl.constexpr):
    """Add the accumulator to the fp32 total in shared memory; the next product starts from zero."""
    part = _shared_order(acc, DP)
    decay = _shared_order(spread(gl.exp2(m_total - m), acc), DP)
    L: gl.constexpr = part.type.layout
    total.store(total.load(L) * decay + part)


@gluon.jit
def _total(total, L: gl.constexpr, DP: gl.constexpr):
    """The fp32 total as an accumulator of layout `L`."""
    part = _shared_order(gl.zeros([64, DP], gl.float32, layout=L), DP)
    L_T: gl.constexpr = part.type.layout
    part = total.load(L_T).reshape([64, DP // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(part.reshape([64, DP]), L, assert_trivial=True)


@gluon.jit
def _walk(
    tile, memory, stage, phase, total, of_keys, blocks, whole, m_i, l_i, acc, CONFIG: gl.constexpr
):  # fmt: skip
    """The key blocks of a tile, one after the other: maxima, row sums, accumulator.

    The first is in a stage of the rings, from which on the blocks of the next tile follow.
    """
    k_scale, k_scale_finite, _term, drifts = of_keys
    low = tile.low
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    PV8: gl.constexpr = CONFIG.PV8
    EARLY: gl.constexpr = CONFIG.EARLY
    FLUSH: gl.constexpr = CONFIG.FLUSH
    L_QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    m_total = m_i
    qk = gl.zeros([64, BLOCK_N], gl.int32 if CONFIG.QK8 else gl.float32, layout=L_QK)
    if EARLY:
        k = memory.keys()
        k.acquire(stage, phase, blocks > low)
        qk = scores(tile.q, k, stage, CONFIG)
    # Blocks of which some rows do not see every key
    for i in range(blocks - whole):
        j = blocks - 1 - i
        qk, m_i, l_i, acc, stage, phase = step(
            tile, memory, stage, phase, gl.load(k_scale_finite + j), j, qk, m_i, l_i, acc, True,
            True, CONFIG,
        )  # fmt: skip
    # Blocks that every row sees whole, in segments between two flushes
    if CONFIG.TERM:
        k_scale = k_scale_finite
    block_scale = gl.load(k_scale + gl.maximum(whole - 1, 0))
    length = _segment(drifts, whole - low, FLUSH, PV8)
    for segment in range(gl.maximum((whole - low + length - 1) // length, 1)):
        last = whole - 1 - segment * length
        for i in range(gl.minimum(length, last + 1 - low)):
            j = last - i
            following = gl.load(k_scale + gl.maximum(j - 1, 0))
            qk, m_i, l_i, acc, stage, phase = step(
                tile, memory, stage, phase, block_scale, j, qk, m_i, l_i, acc,
                (i > 0) | (segment == 0), False, CONFIG,
            )  # fmt: skip
            block_scale = following
        if FLUSH > 0:
            _flush(total, acc, m_i, m_total, HEAD_DIM)
            m_total = m_i
    if EARLY:
        warpgroup_mma_wait(0, deps=(qk,))
    return m_i, l_i, acc, stage, phase


@gluon.jit
def _pv_delayed_walk(
    tile, memory, stage, phase, total, of_keys, blocks, whole, m_i, l_i, acc, CONFIG: gl.constexpr
):  # fmt: skip
    """As `_walk`, with `pv_delayed_step`: the product with V of a block is a step late."""
    k_scale, k_scale_finite, _term, drifts = of_keys
    low = tile.low
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    FLUSH: gl.constexpr = CONFIG.FLUSH
    L_QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    L_M: gl.constexpr = m_i.type.layout
    p = gl.zeros([64, BLOCK_N], gl.float16, layout=L_QK)
    alpha = gl.full([64, 4], 1.0, gl.float32, layout=L_M)
    m_total = m_i
    # A loop does not carry a name that its first turn leaves at what it was before: not `stage`,
    # `phase` and `m_i` themselves.
    v_stage = stage + 0
    v_phase = phase + 0
    m_acc = gl.full([64, 4], LOWEST, gl.float32, layout=L_M)
    # Blocks of which some rows do not see every key
    for i in range(blocks - whole):
        j = blocks - 1 - i
        m_acc = m_i
        p, alpha, m_i, l_i, acc, following, its_phase = pv_delayed_step(
            tile, memory, stage, phase, v_stage, v_phase, i > 0, gl.load(k_scale_finite + j), j, p,
            alpha, m_i, l_i, acc, True, True, CONFIG,
        )  # fmt: skip
        v_stage = stage
        v_phase = phase
        stage = following
        phase = its_phase
    # Blocks that every row sees whole, in segments between two flushes
    if CONFIG.TERM:
        k_scale = k_scale_finite
    block_scale = gl.load(k_scale + gl.maximum(whole - 1, 0))
    length = _segment(drifts, whole - low, FLUSH, False)
    for segment in range(gl.maximum((whole - low + length - 1) // length, 1)):
        last = whole - 1 - segment * length
        for i in range(gl.minimum(length, last + 1 - low)):
            j = last - i
            next_scale = gl.load(k_scale + gl.maximum(j - 1, 0))
            m_acc = m_i
            p, alpha, m_i, l_i, acc, following, its_phase = pv_delayed_step(
                tile, memory, stage, phase, v_stage, v_phase, j < blocks - 1, block_scale, j, p,
                alpha, m_i, l_i, acc, (i > 0) | (segment == 0), False, CONFIG,
            )  # fmt: skip
            block_scale = next_scale
            v_stage = stage
            v_phase = phase
            stage = following
            phase = its_phase
        if FLUSH > 0:
            _flush(total, acc, m_acc, m_total, HEAD_DIM)
            m_total = m_acc
    # P V of the last block
    if FLUSH == 0:
        acc = rescaled(acc, alpha, HEAD_DIM)
    v = memory.values()
    v.acquire(v_stage, v_phase, blocks > low)
    acc, _a = values(p, v, v_stage, acc, FLUSH == 0, CONFIG)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v.release(v_stage, blocks > low)
    if FLUSH > 0:
        _flush(total, acc, m_i, m_total, HEAD_DIM)
    return m_i, l_i, acc, stage, phase


@gluon.jit
def _attend(
    memory, of_queries, of_values, of_keys, of_tiles, split, o, lse, pieces, strides, lengths,
    GROUP: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """One warpgroup: of each tile of the program 64 rows against its key blocks."""
    q_scale, shift = of_queries
    k_scale, k_scale_finite, key_term, v_drifts = of_keys
    v_scale, v_mean, v_residual, v_unit = of_values
    stride_ob, stride_oh, stride_os, stride_od = strides
    seq_q, seq_k, q_rows, k_rows, lse_rows = lengths
    _row_blocks, heads_q, _ratio = of_tiles
    BLOCK_M: gl.constexpr = CONFIG.GROUPS * 64
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    D: gl.constexpr = CONFIG.HEAD_DIM
    PV8: gl.constexpr = CONFIG.PV8
    FLUSH: gl.constexpr = CONFIG.FLUSH
    CAUSAL: gl.constexpr = CONFIG.CAUSAL
    SPLIT: gl.constexpr = CONFIG.SPLIT
    L_QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32 if PV8 else 16])
    L_M: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    L_R: gl.constexpr = gl.SliceLayout(1, L_QK)
    q = memory.q.tiles.index(GROUP)  # (64, HEAD_DIM)
    total = memory.totals
    if FLUSH > 0:
        total = memory.totals.index(GROUP)  # (64, HEAD_DIM)
    stage = 0
    phase = 0
    q_phase = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turns, more = turns_of(program, programs, split, SPLIT)
    for turn in range(turns + more):
        # Which tile, and which of its key blocks
        at, low, high, piece = piece_of(turn, turns, program, programs, split, SPLIT)
        bh, kv, first_row = place_of(at, of_tiles, BLOCK_M, CAUSAL)
        blocks, whole = key_blocks(first_row, seq_q, seq_k, BLOCK_M, BLOCK_N, CAUSAL)
        if SPLIT:
            blocks = high
            whole = gl.minimum(whole, high)
        first_row += GROUP * 64
        offs_m = first_row + gl.arange(0, 64, layout=L_R)
        q_row = bh.to(gl.int64) * q_rows
        of_block = kv * (k_rows // BLOCK_N)
        keys = (
            k_scale + of_block, k_scale_finite + of_block, key_term + kv.to(gl.int64) * k_rows,
            v_drifts + kv,
        )  # fmt: skip
        m_i = gl.full([64, 4], 0.0 if CONFIG.POSITIVE else LOWEST, gl.float32, layout=L_M)
        l_i = gl.zeros([64, 4], gl.float32, layout=L_M)
        row_scale = in_lanes(gl.load(q_scale + q_row + offs_m), l_i)  # (64,) to (64, 4)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, layout=L_O)
        if FLUSH > 0:
            total.store(_shared_order(acc, HEAD_DIM))
        # Its key blocks
        memory.q.acquire(GROUP, q_phase)
        tile = QueryTile(q, offs_m, row_scale, keys[2], low, seq_q, seq_k)
        if CONFIG.DELAYED:
            m_i, l_i, acc, stage, phase = _pv_delayed_walk(
                tile, memory, stage, phase, total, keys, blocks, whole, m_i, l_i, acc, CONFIG
            )  # fmt: skip
        else:
            m_i, l_i, acc, stage, phase = _walk(
                tile, memory, stage, phase, total, keys, blocks, whole, m_i, l_i, acc, CONFIG
            )  # fmt: skip
        memory.q.release(GROUP)
        q_phase ^= 1
        # Epilogue: normalise and store, a piece of a split tile to scratch
        if FLUSH > 0:
            acc = _total(total, L_O, HEAD_DIM)
        if PV8 == 0:
            l_i = in_lanes(gl.sum(l_i, 1), l_i)
        of_head = (
            v_scale + kv * HEAD_DIM, v_mean + kv * HEAD_DIM, v_residual + kv * HEAD_DIM,
            v_unit + kv * HEAD_DIM,
        )  # fmt: skip
        if SPLIT:
            if piece >= 0:
                _store_piece(pieces, acc, l_i, m_i, of_head, piece, GROUP, CONFIG)
        if piece < 0:
            to = o + (bh // heads_q).to(gl.int64) * stride_ob
            to += (bh % heads_q).to(gl.int64) * stride_oh
            _store_rows(
                to, acc, l_i, of_head, stride_os, stride_od, first_row, seq_q, D, HEAD_DIM, PV8
            )  # fmt: skip
            if CONFIG.LSE:
                value = _log_sum(l_i, m_i, L_R)
                if CONFIG.SHIFT:
                    alive = value != float("-inf")
                    value = gl.where(alive, value + gl.load(shift + q_row + offs_m), value)
                gl.store(
                    lse + bh.to(gl.int64) * lse_rows + offs_m, value * LN2, mask=offs_m < seq_q
                )  # fmt: skip


@gluon.jit
def _log_sum(norm, m, L: gl.constexpr):
    """log2 of rows' sums, -inf of those without a visible key."""
    norm = gl.convert_layout(gl.max(norm, 1), L, assert_trivial=True)
    m = gl.convert_layout(gl.max(m, 1), L, assert_trivial=True)
    return gl.where(norm != 0.0, gl.log2(norm) - OFFSET + m, float("-inf"))


@gluon.jit
def _store_piece(
    pieces, acc, norm, m, of_values, piece, GROUP: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Store what a part of the keys makes of a tile's rows: the output, and log2 of the sums."""
    outs, sums = pieces
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    PV8: gl.constexpr = CONFIG.PV8
    L: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = gl.arange(0, 64, layout=L)
    first_row = (piece * CONFIG.GROUPS + GROUP) * 64
    to = outs + first_row.to(gl.int64) * HEAD_DIM
    _store_rows(to, acc, norm, of_values, HEAD_DIM, 1, 0, 64, HEAD_DIM, HEAD_DIM, PV8)
    gl.store(sums + first_row + rows, _log_sum(norm, m, L))


@gluon.jit
def _store_rows(
    o, acc, norm, of_values, stride_os, stride_od, first_row, seq_q,
    D: gl.constexpr, DP: gl.constexpr, PV8: gl.constexpr,
):  # fmt: skip
    """Normalise, undo V's scale and mean, and store; rows without a visible key are 0."""
    v_scale, v_mean, v_residual, v_unit = of_values
    L: gl.constexpr = acc.type.layout
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, L))
    mean = gl.load(v_mean + d)
    if PV8:
        mean -= gl.load(v_residual + d).to(gl.float32) * gl.load(v_unit + d)
    alive = norm != 0.0  # NaN is alive: it has to be seen
    inverse = 1.0 / gl.where(alive, norm, 1.0)
    out = acc * spread(inverse, acc) * gl.expand_dims(gl.load(v_scale + d), 0)
    out = out + gl.expand_dims(mean, 0)
    kept = gl.where(alive, 1.0, 0.0)
    out = gl.where(spread(kept, acc) != 0.0, out, 0.0)
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    live = gl.expand_dims(rows < seq_q, 1) & gl.expand_dims(d < D, 0)
    at = gl.expand_dims(rows.to(gl.int64) * stride_os, 1)
    at = o + at + gl.expand_dims(d.to(gl.int64) * stride_od, 0)
    gl.store(at, out.to(o.dtype.element_ty), mask=live)


@gluon.jit
def _allocated(q_desc, k_desc, v_desc, CONFIG: gl.constexpr):
    """The rings, their barriers set up, and the tiles of totals and ones."""
    GROUPS: gl.constexpr = CONFIG.GROUPS
    STAGES: gl.constexpr = CONFIG.STAGES
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    q_tiles = gl.allocate_shared_memory(
        q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout
    )
    v_tiles = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout
    )
    L_ONES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    if CONFIG.PV8:
        one = gl.full([8, BLOCK_N], 0x38, gl.int8, layout=L_ONES).to(gl.float8e4nv, bitcast=True)
    else:
        one = gl.full([8, BLOCK_N], 1.0, gl.float16, layout=L_ONES)
    ones = gl.allocate_shared_memory(
        one.dtype, [8, BLOCK_N], gl.NVMMASharedLayout.get_default_for([8, BLOCK_N], one.dtype), one
    )
    if CONFIG.FLUSH > 0:
        totals = gl.allocate_shared_memory(
            gl.float32, [GROUPS, 64, HEAD_DIM],
            gl.SwizzledSharedLayout(16, 1, HEAD_DIM // 16, [1, 0]),
        )  # fmt: skip
    else:
        totals = ones
    q = new_ring(q_tiles, GROUPS)
    k = new_ring(k_tiles, STAGES)
    v = new_ring(v_tiles, STAGES)
    for i in gl.static_range(GROUPS):
        q.init(i, 1)
    for i in gl.static_range(STAGES):
        k.init(i, GROUPS)
        v.init(i, GROUPS)
    fence_async_shared()
    return Memory(q, totals, k, v, ones)


@gluon.jit(
    do_not_specialize=[
        "heads_q", "ratio", "seq_q", "seq_k", "q_rows", "row_blocks", "tiles", "whole", "blocks",
        "share", "lse_rows",
    ]
)  # fmt: skip
def hopper_attention_kernel(
    q_desc, k_desc, v_desc, outputs, operands, pieces, strides, heads_q, ratio, seq_q, seq_k,
    q_rows, k_rows, row_blocks, tiles, whole, blocks, share, lse_rows, CONFIG: gl.constexpr,
):  # fmt: skip
    """Attention on quantised operands.

    Numbers that no build may depend on are arguments of their own: Triton specialises what is in a
    tuple, whatever `do_not_specialize` says.

    Args:
        q_desc: TMA descriptor of Q.
        k_desc: of K.
        v_desc: of V, transposed where it is FP8.
        outputs: O and LSE.
        operands: scales of Q, of K's blocks with and without infinities, terms of keys; scales,
            means, residuals and their units of V's channels; whether V drifts; shifts of the LSE.
        pieces: outputs and sums of pieces of tiles that are split.
        strides: of O.
        heads_q: heads of Q.
        ratio: heads of Q to one of K.
        seq_q: queries.
        seq_k: keys.
        q_rows: rows of a head of Q's operand.
        k_rows: rows of a head of K's operand.
        row_blocks: tiles of a head.
        tiles: tiles of all heads.
        whole: tiles that a program walks whole.
        blocks: key blocks of a tile.
        share: key blocks that a program walks of the tiles that are split.
        lse_rows: rows of a head of the LSE.
        CONFIG: an `AttentionConfig`.
    """
    memory = _allocated(q_desc, k_desc, v_desc, CONFIG)
    o, lse = outputs
    (q_scale, k_scale, k_scale_finite, key_term, v_scale, v_mean, v_residual, v_unit, v_drifts,
     shift) = operands  # fmt: skip
    # In a new tuple a stride of 1 is no constant to the workers.
    stride_ob, stride_oh, stride_os, stride_od = strides
    strides = (stride_ob, stride_oh, stride_os, stride_od)
    of_queries = (q_scale, shift)
    of_keys = (k_scale, k_scale_finite, key_term, v_drifts)
    of_values = (v_scale, v_mean, v_residual, v_unit)
    of_tiles = (row_blocks, heads_q, ratio)
    split = (tiles, whole, blocks, share)
    lengths = (seq_q, seq_k, q_rows, k_rows, lse_rows)
    # Numbers that are known to the compiler stay so only where they are written in the call.
    R: gl.constexpr = CONFIG.REGISTERS
    if CONFIG.GROUPS == 2:
        gl.warp_specialize([
            (_attend, (memory, of_queries, of_values, of_keys, of_tiles, split, o, lse,
                       pieces, strides, lengths, 0, CONFIG)),
            (_attend, (memory, of_queries, of_values, of_keys, of_tiles, split, o, lse,
                       pieces, strides, lengths, 1, CONFIG)),
            (load_queries, (q_desc, memory, of_tiles, split, q_rows, CONFIG)),
            (load_keys, (k_desc, v_desc, memory, of_tiles, split, seq_q, seq_k, k_rows, CONFIG)),
        ], [4, 1, 1], [R, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (memory, of_queries, of_values, of_keys, of_tiles, split, o, lse,
                       pieces, strides, lengths, 0, CONFIG)),
            (_attend, (memory, of_queries, of_values, of_keys, of_tiles, split, o, lse,
                       pieces, strides, lengths, 1, CONFIG)),
            (_attend, (memory, of_queries, of_values, of_keys, of_tiles, split, o, lse,
                       pieces, strides, lengths, 2, CONFIG)),
            (load_queries, (q_desc, memory, of_tiles, split, q_rows, CONFIG)),
            (load_keys, (k_desc, v_desc, memory, of_tiles, split, seq_q, seq_k, k_rows, CONFIG)),
        ], [4, 4, 1, 1], [R, R, 24, 24])  # fmt: skip
