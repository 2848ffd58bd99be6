"""Gluon code of the Hopper kernels: what a warpgroup does with one block of keys."""

from __future__ import annotations

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import (
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from sage_plugin.kernels.attention.backends.hopper.pipeline import next_stage
from sage_plugin.kernels.attention.backends.hopper.running_max import (
    FLOAT_BITS,
    OFFSET,
    highest_of_thread,
    in_lanes,
    rescaled,
    settled,
    spread,
)
from sage_plugin.kernels.attention.backends.hopper.softmax import (
    fp8_operand,
    half_operand,
    half_weights,
    partial_sums,
    weights,
)


@gluon.jit
def row_sums(p, ones):
    """Start a product of FP8 weights and ones: `(64, 8)` row sums, all columns equal."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    a = gl.convert_layout(p, gl.DotOperandLayout(0, L, 4), assert_trivial=True)
    zeros = gl.zeros([64, 8], gl.float32, layout=L)
    return warpgroup_mma(a, ones.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def with_sums(l, sums):
    """Running row sums `(64, 4)` with the result of `row_sums`."""
    even, _odd = gl.split(sums.reshape([64, 4, 2]))
    L: gl.constexpr = l.type.layout
    return l + gl.convert_layout(even, L, assert_trivial=True)


@gluon.jit
def with_parts(l, x):
    """Running parts of row sums `(64, 4)`, a part a thread, with a block of fp32 weights."""
    L: gl.constexpr = l.type.layout
    return l + gl.convert_layout(partial_sums(x), L, assert_trivial=True)


@gluon.jit
def _masked_scores(qk, scale, tile, j, EDGE: gl.constexpr, CONFIG: gl.constexpr):
    """Scores in log2 units with what keys add to them; -inf where a key is out of reach."""
    L: gl.constexpr = qk.type.layout
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    offs_n = j * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, L))
    x = qk.to(gl.float32) * spread(scale, qk)
    x += gl.expand_dims(gl.load(tile.term + offs_n), 0)  # (1, BLOCK_N)
    if EDGE:
        seen = gl.expand_dims(offs_n < tile.seq_k, 0)
        if CONFIG.CAUSAL:
            last = gl.expand_dims(tile.offs_m + (tile.seq_k - tile.seq_q), 1)
            seen = seen & (gl.expand_dims(offs_n, 0) <= last)
        x = gl.where(seen, x, float("-inf"))
    return x


@gluon.jit
def scores(q, k, stage, CONFIG: gl.constexpr):
    """Start the product of a warpgroup's queries and a block of keys, `(64, BLOCK_N)`.

    With `FROM_BITS` INT8 products count up from the bits of a float, which takes a move for each;
    elsewhere they are converted, which is as slow as two, but nothing waits for it.
    """
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    L_QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    if CONFIG.FROM_BITS:
        start = gl.full([64, BLOCK_N], FLOAT_BITS, gl.int32, layout=L_QK)
    else:
        start = gl.zeros([64, BLOCK_N], gl.int32 if CONFIG.QK8 else gl.float32, layout=L_QK)
    k_tile = k.tiles.index(stage).permute((1, 0))  # (HEAD_DIM, BLOCK_N)
    return warpgroup_mma(q, k_tile, start, use_acc=CONFIG.FROM_BITS, is_async=True)


@gluon.jit
def values(p, v, stage, acc, keep, CONFIG: gl.constexpr):
    """Start the product of weights and a block of values; it adds to `acc` where `keep` is set.

    Returns the product and the weights as its operand.
    """
    PV8: gl.constexpr = CONFIG.PV8
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32 if PV8 else 16])
    if PV8:
        a = fp8_operand(p, gl.DotOperandLayout(0, L_O, 4), BLOCK_N)
        v_tile = v.tiles.index(stage).permute((1, 0))  # (BLOCK_N, HEAD_DIM)
    else:
        a = half_operand(p, gl.DotOperandLayout(0, L_O, 2))
        v_tile = v.tiles.index(stage)  # (BLOCK_N, HEAD_DIM)
    return warpgroup_mma(a, v_tile, acc, use_acc=keep, is_async=True), a


@gluon.jit
def _exponentials(x, scale, sub, LINEAR: gl.constexpr, CONFIG: gl.constexpr):
    """`2^(x * scale - sub)`, as words of FP8 weights or as fp32 numbers."""
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    if CONFIG.PV8:
        return weights(x, scale, sub, BLOCK_N, LINEAR)
    else:
        return half_weights(x, scale, sub)


@gluon.jit
def _masked_weights(qk, m_i, scale, tile, j, EDGE: gl.constexpr, CONFIG: gl.constexpr):
    """Weights of a block of which some keys are hidden or have terms, and the maxima with it."""
    if CONFIG.FROM_BITS:
        qk = qk - FLOAT_BITS
    x = _masked_scores(qk, scale, tile, j, EDGE, CONFIG)
    m_ij = gl.maximum(m_i, in_lanes(gl.max(x, 1), m_i))
    return _exponentials(x, scale * 0.0 + 1.0, m_ij - OFFSET, 0, CONFIG), m_ij


@gluon.jit
def _highest(qk, like, BY_BITS: gl.constexpr):
    """The highest score of each thread and row, by the bits of floats or by their values."""
    if BY_BITS:
        highest = highest_of_thread(qk.to(gl.int32, bitcast=True), like)
        return highest.to(gl.float32, bitcast=True)
    else:
        return highest_of_thread(qk, like).to(gl.float32)


@gluon.jit
def step(
    tile, memory, stage, phase, k_scale, j, qk, m_i, l_i, acc, keep, EDGE: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """One key block of one warpgroup: scores, online softmax, P V, row sums.

    With `EARLY` its scores were started by the step before, and it starts those of the next block,
    which there is down to the tile's lowest.
    """
    PV8: gl.constexpr = CONFIG.PV8
    EARLY: gl.constexpr = CONFIG.EARLY
    FROM_BITS: gl.constexpr = CONFIG.FROM_BITS
    BY_BITS: gl.constexpr = CONFIG.FROM_BITS or CONFIG.POSITIVE
    LINEAR: gl.constexpr = CONFIG.LINEAR
    STAGES: gl.constexpr = CONFIG.STAGES
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    k = memory.keys()
    v = memory.values()
    # Q K^T
    if EARLY == 0:
        k.acquire(stage, phase)
        qk = scores(tile.q, k, stage, CONFIG)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    k.release(stage)
    # Online softmax: new maxima, totals rescaled by alpha, weights p
    scale = tile.row_scale * k_scale
    if CONFIG.TERM or EDGE:
        p, m_ij = _masked_weights(qk, m_i, scale, tile, j, EDGE, CONFIG)
        alpha = gl.exp2(m_i - m_ij)
        acc = rescaled(acc, alpha, HEAD_DIM)
        l_i = l_i * alpha
        m_i = m_ij
    else:
        highest = _highest(qk, m_i, BY_BITS)
        acc, l_i, m_i, mul, sub = settled(acc, l_i, highest, m_i, scale, HEAD_DIM, FROM_BITS)
        x = qk.to(gl.float32, bitcast=FROM_BITS)
        p = _exponentials(x, mul, sub, LINEAR, CONFIG)
    # P V and row sums
    v.acquire(stage, phase)
    acc, a = values(p, v, stage, acc, keep, CONFIG)
    if PV8:
        sums = row_sums(a, memory.ones)
    else:
        l_i = with_parts(l_i, p)
    # Q K^T of the next block
    following, its_phase = next_stage(stage, phase, STAGES)
    if EARLY:
        k.acquire(following, its_phase, j > tile.low)
        qk = scores(tile.q, k, following, CONFIG)
    if PV8:
        acc, sums = warpgroup_mma_wait(EARLY, deps=(acc, sums))
        l_i = with_sums(l_i, sums)
    else:
        acc = warpgroup_mma_wait(EARLY, deps=(acc,))
    v.release(stage)
    return qk, m_i, l_i, acc, following, its_phase


@gluon.jit
def pv_delayed_step(
    tile, memory, stage, phase, v_stage, v_phase, started, k_scale, j, p, alpha, m_i, l_i, acc,
    keep, EDGE: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """One key block of one warpgroup whose fp16 weights `p` meet V in the step after.

    The product of the weights of the block before runs while this block's are made. `p` is zero
    before the first block, whose V it multiplies then; `alpha` is what `acc` has not seen yet.
    """
    STAGES: gl.constexpr = CONFIG.STAGES
    HEAD_DIM: gl.constexpr = CONFIG.PADDED_DIM
    k = memory.keys()
    v = memory.values()
    # P V of the block before, and Q K^T
    acc = rescaled(acc, alpha, HEAD_DIM)
    v.acquire(v_stage, v_phase)
    k.acquire(stage, phase)
    qk = scores(tile.q, k, stage, CONFIG)
    acc, _a = values(p, v, v_stage, acc, keep, CONFIG)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    k.release(stage)
    # Online softmax
    scale = tile.row_scale * k_scale
    if CONFIG.TERM or EDGE:
        p, m_ij = _masked_weights(qk, m_i, scale, tile, j, EDGE, CONFIG)
    else:
        highest = in_lanes(gl.max(qk, 1).to(gl.float32), m_i)
        m_ij = gl.maximum(m_i, highest * scale)
        p = half_weights(qk.to(gl.float32), scale, m_ij - OFFSET)
    alpha = gl.exp2(m_i - m_ij)
    l_i = with_parts(l_i * alpha, p)
    following, its_phase = next_stage(stage, phase, STAGES)
    # What ends a basic block here keeps the compiler from waiting for P V above the exponentials.
    k.acquire(following, its_phase, j > tile.low)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v.release(v_stage, started)
    return p.to(gl.float16), alpha, m_ij, l_i, acc, following, its_phase
