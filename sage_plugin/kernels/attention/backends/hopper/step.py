"""Gluon code of the Hopper kernels: what a warpgroup does with one block of keys."""

from __future__ import annotations

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import (
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
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
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage of a ring after another, and the phase of its barriers."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


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
def _hidden_scores(
    s, scale, term, rows, j, seq_q, seq_k, BN: gl.constexpr, EDGE: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Scores in log2 units with what keys add to them; -inf where a key is out of reach."""
    L: gl.constexpr = s.type.layout
    keys = j * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    x = s.to(gl.float32) * spread(scale, s)
    x += gl.expand_dims(gl.load(term + keys), 0)
    if EDGE:
        seen = gl.expand_dims(keys < seq_k, 0)
        if CAUSAL:
            last = gl.expand_dims(rows + (seq_k - seq_q), 1)
            seen = seen & (gl.expand_dims(keys, 0) <= last)
        x = gl.where(seen, x, float("-inf"))
    return x


@gluon.jit
def scores(q, k_tiles, stage, BN: gl.constexpr, QK8: gl.constexpr, FROM_BITS: gl.constexpr):
    """Start the product of a warpgroup's queries and a block of keys.

    With `FROM_BITS` INT8 products count up from the bits of a float, which takes a move for each;
    elsewhere they are converted, which is as slow as two, but nothing waits for it.
    """
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    if FROM_BITS:
        start = gl.full([64, BN], FLOAT_BITS, gl.int32, layout=L_S)
    else:
        start = gl.zeros([64, BN], gl.int32 if QK8 else gl.float32, layout=L_S)
    k_tile = k_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(q, k_tile, start, use_acc=FROM_BITS, is_async=True)


@gluon.jit
def values(
    p, v_tiles, stage, acc, keep, DP: gl.constexpr, BN: gl.constexpr, PV8: gl.constexpr
):  # fmt: skip
    """Start the product of weights and a block of values; it adds to `acc` where `keep` is set.

    Returns the product and the weights as its operand.
    """
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 32 if PV8 else 16])
    if PV8:
        a = fp8_operand(p, gl.DotOperandLayout(0, L_O, 4), BN)
        v_tile = v_tiles.index(stage).permute((1, 0))
    else:
        a = half_operand(p, gl.DotOperandLayout(0, L_O, 2))
        v_tile = v_tiles.index(stage)
    return warpgroup_mma(a, v_tile, acc, use_acc=keep, is_async=True), a


@gluon.jit
def _exponentials(
    x, scale, sub, BN: gl.constexpr, LINEAR: gl.constexpr, PV8: gl.constexpr
):  # fmt: skip
    """`2^(x * scale - sub)`, as words of FP8 weights or as fp32 numbers."""
    if PV8:
        return weights(x, scale, sub, BN, LINEAR)
    else:
        return half_weights(x, scale, sub)


@gluon.jit
def _hidden_weights(
    s, m, scale, term, rows, j, seq_q, seq_k, BN: gl.constexpr, FROM_BITS: gl.constexpr,
    PV8: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Weights of a block of which some keys are hidden or have terms, and the maxima with it."""
    if FROM_BITS:
        s = s - FLOAT_BITS
    x = _hidden_scores(s, scale, term, rows, j, seq_q, seq_k, BN, EDGE, CAUSAL)
    top = gl.maximum(m, in_lanes(gl.max(x, 1), m))
    return _exponentials(x, scale * 0.0 + 1.0, top - OFFSET, BN, 0, PV8), top


@gluon.jit
def _highest(s, like, BY_BITS: gl.constexpr):
    """The highest score of each thread and row, by the bits of floats or by their values."""
    if BY_BITS:
        highest = highest_of_thread(s.to(gl.int32, bitcast=True), like)
        return highest.to(gl.float32, bitcast=True)
    else:
        return highest_of_thread(s, like).to(gl.float32)


@gluon.jit
def step(
    q, rings, stage, phase, row_scale, k_scale, term, rows, j, low, s, m, l, acc, keep, seq_q,
    seq_k, DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, QK8: gl.constexpr,
    PV8: gl.constexpr, LINEAR: gl.constexpr, POSITIVE: gl.constexpr, EARLY: gl.constexpr,
    TERM: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One key block of one warpgroup: scores, online softmax, P V, row sums.

    With `EARLY` its scores were started by the step before, and it starts those of the next block,
    which there is down to block `low`.
    """
    FROM_BITS: gl.constexpr = QK8 and PV8
    k_tiles, v_tiles, ones, k_full, k_empty, v_full, v_empty = rings
    if EARLY == 0:
        mbarrier.wait(k_full.index(stage), phase)
        s = scores(q, k_tiles, stage, BN, QK8, FROM_BITS)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    scale = row_scale * k_scale
    if TERM or EDGE:
        p, top = _hidden_weights(
            s, m, scale, term, rows, j, seq_q, seq_k, BN, FROM_BITS, PV8, EDGE, CAUSAL
        )  # fmt: skip
        decay = gl.exp2(m - top)
        acc = rescaled(acc, decay, DP)
        l = l * decay
        m = top
    else:
        highest = _highest(s, m, FROM_BITS or POSITIVE)
        acc, l, m, mul, sub = settled(acc, l, highest, m, scale, DP, FROM_BITS)
        x = s.to(gl.float32, bitcast=FROM_BITS)
        p = _exponentials(x, mul, sub, BN, LINEAR, PV8)
    mbarrier.wait(v_full.index(stage), phase)
    acc, a = values(p, v_tiles, stage, acc, keep, DP, BN, PV8)
    if PV8:
        sums = row_sums(a, ones)
    else:
        l = with_parts(l, p)
    following, its_phase = next_stage(stage, phase, STAGES)
    if EARLY:
        mbarrier.wait(k_full.index(following), its_phase, pred=j > low)
        s = scores(q, k_tiles, following, BN, QK8, FROM_BITS)
    if PV8:
        acc, sums = warpgroup_mma_wait(EARLY, deps=(acc, sums))
        l = with_sums(l, sums)
    else:
        acc = warpgroup_mma_wait(EARLY, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return s, m, l, acc, following, its_phase


@gluon.jit
def late_step(
    q, rings, stage, phase, v_stage, v_phase, started, row_scale, k_scale, term, rows, j, low, p,
    decay, m, l, acc, keep, seq_q, seq_k,
    DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, QK8: gl.constexpr,
    TERM: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One key block of one warpgroup whose fp16 weights `p` meet V in the step after.

    The product of the weights of the block before runs while this block's are made. `p` is zero
    before the first block, whose V it multiplies then; `decay` is what `acc` has not seen yet.
    """
    k_tiles, v_tiles, _ones, k_full, k_empty, v_full, v_empty = rings
    acc = rescaled(acc, decay, DP)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    mbarrier.wait(k_full.index(stage), phase)
    s = scores(q, k_tiles, stage, BN, QK8, False)
    acc, _a = values(p, v_tiles, v_stage, acc, keep, DP, BN, False)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    scale = row_scale * k_scale
    if TERM or EDGE:
        x, top = _hidden_weights(
            s, m, scale, term, rows, j, seq_q, seq_k, BN, False, False, EDGE, CAUSAL
        )  # fmt: skip
    else:
        highest = in_lanes(gl.max(s, 1).to(gl.float32), m)
        top = gl.maximum(m, highest * scale)
        x = half_weights(s.to(gl.float32), scale, top - OFFSET)
    fresh = gl.exp2(m - top)
    l = with_parts(l * fresh, x)
    following, its_phase = next_stage(stage, phase, STAGES)
    # What ends a basic block here keeps the compiler from waiting for P V above the exponentials.
    mbarrier.wait(k_full.index(following), its_phase, pred=j > low)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(v_stage), count=1, pred=started)
    return x.to(gl.float16), fresh, top, l, acc, following, its_phase
