"""The Hopper attention kernel in Gluon: one warp loads, two or three warpgroups multiply.

A program owns 64 query rows for each of its warpgroups and walks the key blocks that any of its
rows sees, from the last to the first, so that the blocks that need comparisons come first. K and V
come through two rings in shared memory, each stage with a "full" and an "empty" barrier. Row
sums are a product of the rounded weights with ones. Where K was smoothed and every row sees every
key, scores sum to zero, so that maxima start at zero and FP8 products compare as integers. With `FLUSH` the tensor cores' accumulator is
added to an fp32 one in shared memory every `FLUSH` blocks, since tensor cores truncate as they add.
"""

from __future__ import annotations

from sage_plugin.kernels.attention.gluon_names import (
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from sage_plugin.kernels.attention.hopper_weights import by_row, fp8_operand, rescaled, weights

LOWEST = gl.constexpr(-3e38)
LN2 = gl.constexpr(0.6931471805599453)
FLOAT_START = gl.constexpr(12582912.0)
FLOAT_BITS = gl.constexpr(0x4B400000)
"""INT8 products start from the bits of 3 * 2^22: what they count up to reads as a float."""


@gluon.jit
def _key_blocks(
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
def _next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, memory, q_row, k_row, v_row, blocks, GROUPS: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: Q once, then K and V of every block into the next empty stages."""
    q_tiles, k_tiles, v_tiles, _totals, _ones, q_full, k_full, k_empty, v_full, v_empty = memory
    for group in gl.static_range(GROUPS):
        mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
        async_load(q_desc, [q_row + group * 64, 0], q_full.index(group), q_tiles.index(group))
    stage = 0
    phase = 1
    for i in range(blocks):
        first_key = (blocks - 1 - i) * BN
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        async_load(k_desc, [k_row + first_key, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        async_load(v_desc, [v_row, first_key], v_full.index(stage), v_tiles.index(stage))
        stage, phase = _next_stage(stage, phase, STAGES)


@gluon.jit
def _row_sums(p, ones):
    """Start a product of weights and ones: `(64, 8)` row sums, all columns equal."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    a = gl.convert_layout(p, gl.DotOperandLayout(0, L, 4), assert_trivial=True)
    zeros = gl.zeros([64, 8], gl.float32, layout=L)
    return warpgroup_mma(a, ones.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _hidden_scores(
    s, scale, term, rows, j, seq_q, seq_k, BN: gl.constexpr, EDGE: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Scores in log2 units with what keys add to them; -inf where a key is out of reach."""
    L: gl.constexpr = s.type.layout
    keys = j * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    x = s.to(gl.float32) * gl.expand_dims(scale, 1)
    x += gl.expand_dims(gl.load(term + keys), 0)
    if EDGE:
        seen = gl.expand_dims(keys < seq_k, 0)
        if CAUSAL:
            last = gl.expand_dims(rows + (seq_k - seq_q), 1)
            seen = seen & (gl.expand_dims(keys, 0) <= last)
        x = gl.where(seen, x, float("-inf"))
    return x


@gluon.jit
def _scores(q, k_tiles, stage, BN: gl.constexpr, QK8: gl.constexpr):
    """Start the product of a warpgroup's queries and a block of keys."""
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    if QK8:
        start = gl.full([64, BN], FLOAT_BITS, gl.int32, layout=L_S)
    else:
        start = gl.zeros([64, BN], gl.float32, layout=L_S)
    k_tile = k_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(q, k_tile, start, use_acc=QK8, is_async=True)


@gluon.jit
def _weights(
    s, m, row_scale, k_scale, term, rows, j, seq_q, seq_k, BN: gl.constexpr, QK8: gl.constexpr,
    OFFSET: gl.constexpr, LINEAR: gl.constexpr, POSITIVE: gl.constexpr, TERM: gl.constexpr,
    EDGE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Words of the weights of a block, and the new maximum of each row."""
    scale = row_scale * k_scale
    if TERM or EDGE:
        if QK8:
            s = s - FLOAT_BITS
        x = _hidden_scores(s, scale, term, rows, j, seq_q, seq_k, BN, EDGE, CAUSAL)
        top = gl.maximum(m, gl.max(x, 1))
        return weights(x, scale * 0.0 + 1.0, top - OFFSET, BN, 0), top
    else:
        if QK8 or POSITIVE:
            highest = gl.max(s.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
        else:
            highest = gl.max(s, 1)
        if QK8:
            highest -= FLOAT_START
        top = gl.maximum(m, highest * scale)
        sub = top - OFFSET
        if QK8:
            sub += scale * FLOAT_START
        return weights(s.to(gl.float32, bitcast=True), scale, sub, BN, LINEAR), top


@gluon.jit
def _step(
    q, k_tiles, v_tiles, ones, k_full, k_empty, v_full, v_empty, stage, phase, row_scale, k_scale, term, rows, j, s, m,
    l, acc, keep, seq_q, seq_k, DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    QK8: gl.constexpr, OFFSET: gl.constexpr, LINEAR: gl.constexpr, POSITIVE: gl.constexpr,
    EARLY: gl.constexpr, TERM: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One key block of one warpgroup: scores, online softmax, P V, row sums.

    With `EARLY` its scores were started by the step before, and it starts those of the next block.
    """
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 32])
    if EARLY == 0:
        mbarrier.wait(k_full.index(stage), phase)
        s = _scores(q, k_tiles, stage, BN, QK8)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    words, top = _weights(
        s, m, row_scale, k_scale, term, rows, j, seq_q, seq_k, BN, QK8, OFFSET, LINEAR, POSITIVE,
        TERM, EDGE, CAUSAL,
    )  # fmt: skip
    decay = gl.exp2(m - top)
    p = fp8_operand(words, gl.DotOperandLayout(0, L_O, 4), BN)
    acc = rescaled(acc, decay, DP)
    mbarrier.wait(v_full.index(stage), phase)
    v_tile = v_tiles.index(stage).permute((1, 0))
    acc = warpgroup_mma(p, v_tile, acc, use_acc=keep, is_async=True)
    sums = _row_sums(p, ones)
    following, its_phase = _next_stage(stage, phase, STAGES)
    if EARLY:
        mbarrier.wait(k_full.index(following), its_phase, pred=j > 0)
        s = _scores(q, k_tiles, following, BN, QK8)
        acc, sums = warpgroup_mma_wait(1, deps=(acc, sums))
    else:
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    even, _odd = gl.split(sums.reshape([64, 4, 2]))
    L_L: gl.constexpr = l.type.layout
    even = gl.convert_layout(even, L_L, assert_trivial=True)
    l = l * by_row(decay, L_L) + even
    mbarrier.arrive(v_empty.index(stage), count=1)
    return s, top, l, acc, following, its_phase


@gluon.jit
def _shared_order(acc, DP: gl.constexpr):
    """An accumulator with its channels in an order that gives a thread four in a row."""
    return acc.reshape([64, DP // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, DP])


@gluon.jit
def _flush(total, acc, m, m_total, DP: gl.constexpr):
    """Add the accumulator to the fp32 total in shared memory; the next product starts from zero."""
    part = _shared_order(acc, DP)
    L: gl.constexpr = part.type.layout
    decay = by_row(gl.exp2(m_total - m), L)
    total.store(total.load(L) * decay + part)


@gluon.jit
def _total(total, L: gl.constexpr, DP: gl.constexpr):
    """The fp32 total as an accumulator of layout `L`."""
    part = _shared_order(gl.zeros([64, DP], gl.float32, layout=L), DP)
    L_T: gl.constexpr = part.type.layout
    part = total.load(L_T).reshape([64, DP // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(part.reshape([64, DP]), L, assert_trivial=True)


@gluon.jit
def _attend(
    memory, operands, sizes, o, lse, GROUP: gl.constexpr, D: gl.constexpr, DP: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, QK8: gl.constexpr, OFFSET: gl.constexpr,
    LINEAR: gl.constexpr, FLUSH: gl.constexpr, EARLY: gl.constexpr, TERM: gl.constexpr,
    CAUSAL: gl.constexpr, LSE: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows against all key blocks of the program."""
    q_tiles, k_tiles, v_tiles, totals, ones, q_full, k_full, k_empty, v_full, v_empty = memory
    q_scale, k_scale, k_scale_finite, term, v_scale, v_mean, v_residual, v_unit, shift = operands
    first_row, blocks, whole, seq_q, seq_k, stride_os, stride_od = sizes
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 32])
    L_L: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    L_R: gl.constexpr = gl.SliceLayout(1, L_S)
    rows = first_row + GROUP * 64 + gl.arange(0, 64, layout=L_R)
    row_scale = gl.load(q_scale + rows)
    q = q_tiles.index(GROUP)
    POSITIVE: gl.constexpr = QK8 == 0 and SHIFT and TERM == 0 and CAUSAL == 0
    m = gl.full([64], 0.0 if POSITIVE else LOWEST, gl.float32, layout=L_R)
    l = gl.zeros([64, 4], gl.float32, layout=L_L)
    acc = gl.zeros([64, DP], gl.float32, layout=L_O)
    m_total = m
    if FLUSH > 0:
        total = totals.index(GROUP)
        total.store(_shared_order(acc, DP))
    mbarrier.wait(q_full.index(GROUP), 0)
    stage = 0
    phase = 0
    s = gl.zeros([64, BN], gl.int32 if QK8 else gl.float32, layout=L_S)
    if EARLY:
        mbarrier.wait(k_full.index(0), 0, pred=blocks > 0)
        s = _scores(q, k_tiles, 0, BN, QK8)
    for i in range(blocks - whole):
        j = blocks - 1 - i
        s, m, l, acc, stage, phase = _step(
            q, k_tiles, v_tiles, ones, k_full, k_empty, v_full, v_empty, stage, phase, row_scale,
            gl.load(k_scale_finite + j), term, rows, j, s, m, l, acc, True, seq_q, seq_k, DP, BN,
            STAGES, QK8, OFFSET, 0, POSITIVE, EARLY, TERM, True, CAUSAL,
        )  # fmt: skip
    if TERM:
        k_scale = k_scale_finite
    block_scale = gl.load(k_scale + gl.maximum(whole - 1, 0))
    length = FLUSH if FLUSH > 0 else gl.maximum(whole, 1)
    for segment in range(gl.maximum((whole + length - 1) // length, 1)):
        last = whole - 1 - segment * length
        for i in range(gl.minimum(length, last + 1)):
            j = last - i
            following = gl.load(k_scale + gl.maximum(j - 1, 0))
            s, m, l, acc, stage, phase = _step(
                q, k_tiles, v_tiles, ones, k_full, k_empty, v_full, v_empty, stage, phase, row_scale, block_scale, term,
                rows, j, s, m, l, acc, (i > 0) | (segment == 0), seq_q, seq_k, DP, BN, STAGES,
                QK8, OFFSET, LINEAR, POSITIVE, EARLY, TERM, False, CAUSAL,
            )  # fmt: skip
            block_scale = following
        if FLUSH > 0:
            _flush(total, acc, m, m_total, DP)
            m_total = m
    if EARLY:
        warpgroup_mma_wait(0, deps=(s,))
    if FLUSH > 0:
        acc = _total(total, L_O, DP)
    norm = gl.max(l, 1)
    _store_rows(
        o, acc, norm, v_scale, v_mean, v_residual, v_unit, stride_os, stride_od,
        first_row + GROUP * 64, seq_q, D, DP,
    )  # fmt: skip
    if LSE:
        norm = gl.convert_layout(norm, L_R, assert_trivial=True)
        value = gl.log2(norm) - OFFSET + m
        if SHIFT:
            value += gl.load(shift + rows)
        value = gl.where(norm != 0.0, value * LN2, float("-inf"))
        gl.store(lse + rows, value, mask=rows < seq_q)


@gluon.jit
def _store_rows(
    o, acc, norm, v_scale, v_mean, v_residual, v_unit, stride_os, stride_od, first_row, seq_q,
    D: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Normalise, undo V's scale and mean, and store; rows without a visible key are 0."""
    L: gl.constexpr = acc.type.layout
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, L))
    gained = gl.load(v_residual + d).to(gl.float32) * gl.load(v_unit + d)
    mean = gl.load(v_mean + d) - gained
    alive = norm != 0.0  # NaN is alive: it has to be seen
    inverse = 1.0 / gl.where(alive, norm, 1.0)
    out = acc * by_row(inverse, L) * gl.expand_dims(gl.load(v_scale + d), 0)
    out = out + gl.expand_dims(mean, 0)
    kept = gl.where(alive, 1.0, 0.0)
    out = gl.where(by_row(kept, L) != 0.0, out, 0.0)
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    live = gl.expand_dims(rows < seq_q, 1) & gl.expand_dims(d < D, 0)
    at = gl.expand_dims(rows.to(gl.int64) * stride_os, 1)
    at = o + at + gl.expand_dims(d.to(gl.int64) * stride_od, 0)
    gl.store(at, out.to(o.dtype.element_ty), mask=live)


@gluon.jit(
    do_not_specialize=["heads_q", "ratio", "seq_q", "seq_k", "q_rows", "row_blocks", "lse_rows"]
)
def hopper_attention_kernel(
    q_desc, k_desc, v_desc, o, lse, q_scale, k_scale, k_scale_finite, key_term, v_scale, v_mean,
    v_residual, v_unit, shift, stride_ob, stride_oh, stride_os, stride_od, heads_q, ratio, seq_q,
    seq_k, q_rows, k_rows, row_blocks, lse_rows,
    D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, QK8: gl.constexpr, OFFSET: gl.constexpr, LINEAR: gl.constexpr,
    FLUSH: gl.constexpr, EARLY: gl.constexpr, TERM: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
    SHIFT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention on quantised operands with FP8 V; Q, K and V are TMA descriptors."""
    BM: gl.constexpr = GROUPS * 64
    pid = gl.program_id(0)
    block = pid % row_blocks
    if CAUSAL:
        block = row_blocks - 1 - block
    bh = pid // row_blocks
    kv = (bh // heads_q) * (heads_q // ratio) + (bh % heads_q) // ratio
    first_row = block * BM
    blocks, whole = _key_blocks(first_row, seq_q, seq_k, BM, BN, CAUSAL)
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
    one = gl.full([8, BN], 0x38, gl.int8, layout=L_ONES).to(gl.float8e4nv, bitcast=True)
    ones = gl.allocate_shared_memory(
        gl.float8e4nv, [8, BN], gl.NVMMASharedLayout.get_default_for([8, BN], gl.float8e4nv), one
    )
    if FLUSH > 0:
        totals = gl.allocate_shared_memory(
            gl.float32, [GROUPS, 64, DP], gl.SwizzledSharedLayout(16, 1, DP // 16, [1, 0])
        )
    else:
        totals = ones
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    o += (bh // heads_q).to(gl.int64) * stride_ob + (bh % heads_q).to(gl.int64) * stride_oh
    if LSE:
        lse += bh.to(gl.int64) * lse_rows
    rows_q = bh.to(gl.int64) * q_rows
    q_scale += rows_q
    shift += rows_q
    k_scale += kv * (k_rows // BN)
    k_scale_finite += kv * (k_rows // BN)
    key_term += kv.to(gl.int64) * k_rows
    v_scale += kv * DP
    v_mean += kv * DP
    v_residual += kv * DP
    v_unit += kv * DP
    memory = (
        q_tiles, k_tiles, v_tiles, totals, ones, q_full, k_full, k_empty, v_full, v_empty,
    )  # fmt: skip
    operands = (
        q_scale, k_scale, k_scale_finite, key_term, v_scale, v_mean, v_residual, v_unit, shift,
    )  # fmt: skip
    sizes = (first_row, blocks, whole, seq_q, seq_k, stride_os, stride_od)
    # Numbers that are known to the compiler stay so only where they are written in the call.
    if GROUPS == 2:
        gl.warp_specialize([
            (_attend, (
                memory, operands, sizes, o, lse, 0, D, DP, BN, STAGES, QK8, OFFSET, LINEAR, FLUSH,
                EARLY, TERM, CAUSAL, LSE, SHIFT)),
            (_attend, (
                memory, operands, sizes, o, lse, 1, D, DP, BN, STAGES, QK8, OFFSET, LINEAR, FLUSH,
                EARLY, TERM, CAUSAL, LSE, SHIFT)),
            (_load, (
                q_desc, k_desc, v_desc, memory, bh * q_rows + first_row, kv * k_rows, kv * DP,
                blocks, GROUPS, BN, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (
                memory, operands, sizes, o, lse, 0, D, DP, BN, STAGES, QK8, OFFSET, LINEAR, FLUSH,
                EARLY, TERM, CAUSAL, LSE, SHIFT)),
            (_attend, (
                memory, operands, sizes, o, lse, 1, D, DP, BN, STAGES, QK8, OFFSET, LINEAR, FLUSH,
                EARLY, TERM, CAUSAL, LSE, SHIFT)),
            (_attend, (
                memory, operands, sizes, o, lse, 2, D, DP, BN, STAGES, QK8, OFFSET, LINEAR, FLUSH,
                EARLY, TERM, CAUSAL, LSE, SHIFT)),
            (_load, (
                q_desc, k_desc, v_desc, memory, bh * q_rows + first_row, kv * k_rows, kv * DP,
                blocks, GROUPS, BN, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
