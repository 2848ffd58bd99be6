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
    mbarrier,
    warpgroup_mma_wait,
)
from sage_plugin.kernels.attention.backends.hopper.loads import load_keys, load_queries
from sage_plugin.kernels.attention.backends.hopper.running_max import (
    OFFSET,
    in_lanes,
    rescaled,
    spread,
)
from sage_plugin.kernels.attention.backends.hopper.step import (
    late_step,
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
    q, rings, stage, phase, total, operands, sizes, rows, row_scale, m, l, acc, DP: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, QK8: gl.constexpr, PV8: gl.constexpr,
    LINEAR: gl.constexpr, POSITIVE: gl.constexpr, FLUSH: gl.constexpr, EARLY: gl.constexpr,
    TERM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The key blocks of a tile, one after the other: maxima, row sums, accumulator.

    The first is in a stage of the rings, from which on the blocks of the next tile follow.
    """
    k_tiles, _v_tiles, _ones, k_full, _k_empty, _v_full, _v_empty = rings
    k_scale, k_scale_finite, term, drifts = operands
    low, blocks, whole, seq_q, seq_k = sizes
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    m_total = m
    s = gl.zeros([64, BN], gl.int32 if QK8 else gl.float32, layout=L_S)
    if EARLY:
        mbarrier.wait(k_full.index(stage), phase, pred=blocks > low)
        s = scores(q, k_tiles, stage, BN, QK8, QK8 and PV8)
    for i in range(blocks - whole):
        j = blocks - 1 - i
        s, m, l, acc, stage, phase = step(
            q, rings, stage, phase, row_scale, gl.load(k_scale_finite + j), term, rows, j, low, s,
            m, l, acc, True, seq_q, seq_k, DP, BN, STAGES, QK8, PV8, 0, POSITIVE, EARLY,
            TERM, True, CAUSAL,
        )  # fmt: skip
    if TERM:
        k_scale = k_scale_finite
    block_scale = gl.load(k_scale + gl.maximum(whole - 1, 0))
    length = _segment(drifts, whole - low, FLUSH, PV8)
    for segment in range(gl.maximum((whole - low + length - 1) // length, 1)):
        last = whole - 1 - segment * length
        for i in range(gl.minimum(length, last + 1 - low)):
            j = last - i
            following = gl.load(k_scale + gl.maximum(j - 1, 0))
            s, m, l, acc, stage, phase = step(
                q, rings, stage, phase, row_scale, block_scale, term, rows, j, low, s, m, l, acc,
                (i > 0) | (segment == 0), seq_q, seq_k, DP, BN, STAGES, QK8, PV8,
                LINEAR, POSITIVE, EARLY, TERM, False, CAUSAL,
            )  # fmt: skip
            block_scale = following
        if FLUSH > 0:
            _flush(total, acc, m, m_total, DP)
            m_total = m
    if EARLY:
        warpgroup_mma_wait(0, deps=(s,))
    return m, l, acc, stage, phase


@gluon.jit
def _late_walk(
    q, rings, stage, phase, total, operands, sizes, rows, row_scale, m, l, acc, DP: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, QK8: gl.constexpr,
    FLUSH: gl.constexpr, TERM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """As `_walk`, with `late_step`: the product with V of a block is a step late."""
    _k_tiles, v_tiles, _ones, _k_full, _k_empty, v_full, v_empty = rings
    k_scale, k_scale_finite, term, drifts = operands
    low, blocks, whole, seq_q, seq_k = sizes
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    p = gl.zeros([64, BN], gl.float16, layout=L_S)
    decay = gl.full([64, 4], 1.0, gl.float32, layout=m.type.layout)
    v_stage = stage
    v_phase = phase
    m_total = m
    # Not `m`: a loop does not carry a name that its first turn leaves at what it was before.
    m_acc = gl.full([64, 4], LOWEST, gl.float32, layout=m.type.layout)
    for i in range(blocks - whole):
        j = blocks - 1 - i
        m_acc = m
        p, decay, m, l, acc, following, its_phase = late_step(
            q, rings, stage, phase, v_stage, v_phase, i > 0, row_scale,
            gl.load(k_scale_finite + j), term, rows, j, low, p, decay, m, l, acc, True, seq_q,
            seq_k, DP, BN, STAGES, QK8, TERM, True, CAUSAL,
        )  # fmt: skip
        v_stage = stage
        v_phase = phase
        stage = following
        phase = its_phase
    if TERM:
        k_scale = k_scale_finite
    block_scale = gl.load(k_scale + gl.maximum(whole - 1, 0))
    length = _segment(drifts, whole - low, FLUSH, False)
    for segment in range(gl.maximum((whole - low + length - 1) // length, 1)):
        last = whole - 1 - segment * length
        for i in range(gl.minimum(length, last + 1 - low)):
            j = last - i
            next_scale = gl.load(k_scale + gl.maximum(j - 1, 0))
            m_acc = m
            p, decay, m, l, acc, following, its_phase = late_step(
                q, rings, stage, phase, v_stage, v_phase, j < blocks - 1, row_scale, block_scale,
                term, rows, j, low, p, decay, m, l, acc, (i > 0) | (segment == 0), seq_q, seq_k, DP,
                BN, STAGES, QK8, TERM, False, CAUSAL,
            )  # fmt: skip
            block_scale = next_scale
            v_stage = stage
            v_phase = phase
            stage = following
            phase = its_phase
        if FLUSH > 0:
            _flush(total, acc, m_acc, m_total, DP)
            m_total = m_acc
    if FLUSH == 0:
        acc = rescaled(acc, decay, DP)
    mbarrier.wait(v_full.index(v_stage), v_phase, pred=blocks > low)
    acc, _a = values(p, v_tiles, v_stage, acc, FLUSH == 0, DP, BN, False)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(v_stage), count=1, pred=blocks > low)
    if FLUSH > 0:
        _flush(total, acc, m, m_total, DP)
    return m, l, acc, stage, phase


@gluon.jit
def _attend(
    memory, operands, of_tiles, shares, o, lse, pieces, strides, lengths, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, QK8: gl.constexpr, PV8: gl.constexpr,
    LINEAR: gl.constexpr, FLUSH: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    TERM: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr, SHIFT: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: of each tile of the program 64 rows against its key blocks."""
    q_tiles, q_full, q_empty, totals, rings = memory
    q_scale, shift, v_scale, v_mean, v_residual, v_unit, of_keys = operands
    k_scale, k_scale_finite, key_term, v_drifts = of_keys
    stride_ob, stride_oh, stride_os, stride_od = strides
    seq_q, seq_k, q_rows, k_rows, lse_rows = lengths
    _row_blocks, heads_q, _ratio = of_tiles
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 32 if PV8 else 16])
    L_L: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    L_R: gl.constexpr = gl.SliceLayout(1, L_S)
    POSITIVE: gl.constexpr = QK8 == 0 and SHIFT and TERM == 0 and CAUSAL == 0
    q = q_tiles.index(GROUP)
    total = totals
    if FLUSH > 0:
        total = totals.index(GROUP)
    stage = 0
    phase = 0
    q_phase = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turns, more = turns_of(program, programs, shares, SPLIT)
    for turn in range(turns + more):
        tile, low, high, piece = piece_of(turn, turns, program, programs, shares, SPLIT)
        bh, kv, first_row = place_of(tile, of_tiles, GROUPS * 64, CAUSAL)
        blocks, whole = key_blocks(first_row, seq_q, seq_k, GROUPS * 64, BN, CAUSAL)
        if SPLIT:
            blocks = high
            whole = gl.minimum(whole, high)
        first_row += GROUP * 64
        rows = first_row + gl.arange(0, 64, layout=L_R)
        q_row = bh.to(gl.int64) * q_rows
        of_block = kv * (k_rows // BN)
        keys = (
            k_scale + of_block, k_scale_finite + of_block, key_term + kv.to(gl.int64) * k_rows,
            v_drifts + kv,
        )  # fmt: skip
        sizes = (low, blocks, whole, seq_q, seq_k)
        m = gl.full([64, 4], 0.0 if POSITIVE else LOWEST, gl.float32, layout=L_L)
        l = gl.zeros([64, 4], gl.float32, layout=L_L)
        row_scale = in_lanes(gl.load(q_scale + q_row + rows), l)
        acc = gl.zeros([64, DP], gl.float32, layout=L_O)
        if FLUSH > 0:
            total.store(_shared_order(acc, DP))
        mbarrier.wait(q_full.index(GROUP), q_phase)
        if LATE:
            m, l, acc, stage, phase = _late_walk(
                q, rings, stage, phase, total, keys, sizes, rows, row_scale, m, l, acc, DP, BN,
                STAGES, QK8, FLUSH, TERM, CAUSAL,
            )  # fmt: skip
        else:
            m, l, acc, stage, phase = _walk(
                q, rings, stage, phase, total, keys, sizes, rows, row_scale, m, l, acc, DP, BN,
                STAGES, QK8, PV8, LINEAR, POSITIVE, FLUSH, EARLY, TERM, CAUSAL,
            )  # fmt: skip
        mbarrier.arrive(q_empty.index(GROUP), count=1)
        q_phase ^= 1
        if FLUSH > 0:
            acc = _total(total, L_O, DP)
        norm = l
        if PV8 == 0:
            norm = in_lanes(gl.sum(l, 1), l)
        of_values = (v_scale + kv * DP, v_mean + kv * DP, v_residual + kv * DP, v_unit + kv * DP)
        if SPLIT:
            if piece >= 0:
                _store_piece(
                    pieces, acc, norm, m, of_values, piece, GROUP, GROUPS, DP, PV8
                )  # fmt: skip
        if piece < 0:
            to = o + (bh // heads_q).to(gl.int64) * stride_ob
            to += (bh % heads_q).to(gl.int64) * stride_oh
            _store_rows(
                to, acc, norm, of_values, stride_os, stride_od, first_row, seq_q, D, DP, PV8
            )  # fmt: skip
            if LSE:
                value = _log_sum(norm, m, L_R)
                if SHIFT:
                    alive = value != float("-inf")
                    value = gl.where(alive, value + gl.load(shift + q_row + rows), value)
                gl.store(lse + bh.to(gl.int64) * lse_rows + rows, value * LN2, mask=rows < seq_q)


@gluon.jit
def _log_sum(norm, m, L: gl.constexpr):
    """log2 of rows' sums, -inf of those without a visible key."""
    norm = gl.convert_layout(gl.max(norm, 1), L, assert_trivial=True)
    m = gl.convert_layout(gl.max(m, 1), L, assert_trivial=True)
    return gl.where(norm != 0.0, gl.log2(norm) - OFFSET + m, float("-inf"))


@gluon.jit
def _store_piece(
    pieces, acc, norm, m, of_values, piece, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    DP: gl.constexpr, PV8: gl.constexpr,
):  # fmt: skip
    """Store what a part of the keys makes of a tile's rows: the output, and log2 of the sums."""
    outs, sums = pieces
    L: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = gl.arange(0, 64, layout=L)
    first_row = (piece * GROUPS + GROUP) * 64
    to = outs + first_row.to(gl.int64) * DP
    _store_rows(to, acc, norm, of_values, DP, 1, 0, 64, DP, DP, PV8)
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


@gluon.jit(
    do_not_specialize=[
        "heads_q", "ratio", "seq_q", "seq_k", "q_rows", "row_blocks", "tiles", "whole", "blocks",
        "share", "lse_rows",
    ]
)  # fmt: skip
def hopper_attention_kernel(
    q_desc, k_desc, v_desc, o, lse, q_scale, k_scale, k_scale_finite, key_term, v_scale, v_mean,
    v_residual, v_unit, v_drifts, shift, piece_outs, piece_sums, stride_ob, stride_oh, stride_os,
    stride_od, heads_q, ratio, seq_q, seq_k, q_rows, k_rows, row_blocks, tiles, whole, blocks,
    share, lse_rows,
    D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, QK8: gl.constexpr, PV8: gl.constexpr,
    LINEAR: gl.constexpr, FLUSH: gl.constexpr, EARLY: gl.constexpr,
    LATE: gl.constexpr, TERM: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
    SHIFT: gl.constexpr, SPLIT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention on quantised operands; Q, K and V are TMA descriptors, FP8 V is transposed."""
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
    if PV8:
        one = gl.full([8, BN], 0x38, gl.int8, layout=L_ONES).to(gl.float8e4nv, bitcast=True)
    else:
        one = gl.full([8, BN], 1.0, gl.float16, layout=L_ONES)
    ones = gl.allocate_shared_memory(
        one.dtype, [8, BN], gl.NVMMASharedLayout.get_default_for([8, BN], one.dtype), one
    )
    if FLUSH > 0:
        totals = gl.allocate_shared_memory(
            gl.float32, [GROUPS, 64, DP], gl.SwizzledSharedLayout(16, 1, DP // 16, [1, 0])
        )
    else:
        totals = ones
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    rings = (k_tiles, v_tiles, ones, k_full, k_empty, v_full, v_empty)
    memory = (q_tiles, q_full, q_empty, totals, rings)
    of_keys = (k_scale, k_scale_finite, key_term, v_drifts)
    operands = (q_scale, shift, v_scale, v_mean, v_residual, v_unit, of_keys)
    of_tiles = (row_blocks, heads_q, ratio)
    shares = (tiles, whole, blocks, share)
    pieces = (piece_outs, piece_sums)
    strides = (stride_ob, stride_oh, stride_os, stride_od)
    lengths = (seq_q, seq_k, q_rows, k_rows, lse_rows)
    # Numbers that are known to the compiler stay so only where they are written in the call.
    if GROUPS == 2:
        gl.warp_specialize([
            (_attend, (
                memory, operands, of_tiles, shares, o, lse, pieces, strides, lengths, 0, 2, D,
                DP, BN, STAGES, QK8, PV8, LINEAR, FLUSH, EARLY, LATE, TERM, CAUSAL, LSE, SHIFT,
                SPLIT)),
            (_attend, (
                memory, operands, of_tiles, shares, o, lse, pieces, strides, lengths, 1, 2, D,
                DP, BN, STAGES, QK8, PV8, LINEAR, FLUSH, EARLY, LATE, TERM, CAUSAL, LSE, SHIFT,
                SPLIT)),
            (load_queries, (q_desc, memory, of_tiles, shares, q_rows, 2, CAUSAL, SPLIT)),
            (load_keys, (
                k_desc, v_desc, memory, of_tiles, shares, seq_q, seq_k, k_rows, 2, DP, BN, STAGES,
                PV8, CAUSAL, SPLIT)),
        ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (
                memory, operands, of_tiles, shares, o, lse, pieces, strides, lengths, 0, 3, D,
                DP, BN, STAGES, QK8, PV8, LINEAR, FLUSH, EARLY, LATE, TERM, CAUSAL, LSE, SHIFT,
                SPLIT)),
            (_attend, (
                memory, operands, of_tiles, shares, o, lse, pieces, strides, lengths, 1, 3, D,
                DP, BN, STAGES, QK8, PV8, LINEAR, FLUSH, EARLY, LATE, TERM, CAUSAL, LSE, SHIFT,
                SPLIT)),
            (_attend, (
                memory, operands, of_tiles, shares, o, lse, pieces, strides, lengths, 2, 3, D,
                DP, BN, STAGES, QK8, PV8, LINEAR, FLUSH, EARLY, LATE, TERM, CAUSAL, LSE, SHIFT,
                SPLIT)),
            (load_queries, (q_desc, memory, of_tiles, shares, q_rows, 3, CAUSAL, SPLIT)),
            (load_keys, (
                k_desc, v_desc, memory, of_tiles, shares, seq_q, seq_k, k_rows, 3, DP, BN, STAGES,
                PV8, CAUSAL, SPLIT)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, 24, 24])  # fmt: skip
