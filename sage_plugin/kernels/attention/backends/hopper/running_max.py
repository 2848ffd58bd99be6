"""Gluon code of the Hopper kernels: running maxima of rows, and what follows them.

A thread holds two rows of a tile, each shared by four threads. What it knows of a row is a number
of a `(64, 4)` tensor, a column a thread, so that no thread has to ask the others: a maximum stays
what it is until a score passes it by more than `HEADROOM`, up to which weights still fit in FP8.
Then the four agree on a new one, and totals are rescaled. That is rare, and leaves the shuffles,
and the wait for them, out of most blocks (after FlashAttention-4, which skips small rescales).
"""

from __future__ import annotations

import struct

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import gl, gluon
from sage_plugin.kernels.quantize.recipe import Recipe

HEADROOM = 1.0
"""Octaves by which a weight may pass the one that its row's maximum stands for."""

OFFSET = gl.constexpr(Recipe("int8", "fp8").p_offset - HEADROOM)
"""log2 of the weight of a score that is its row's maximum."""

FLOAT_START = gl.constexpr(12582912.0)
FLOAT_BITS = gl.constexpr(0x4B400000)
"""INT8 products whose weights are FP8 start from the bits of 3 * 2^22: what they count up to reads
as a float."""

STEEPEST = gl.constexpr(0.125)
"""Largest step of an INT8 score in log2 units, the row's maximum kept: by then rounding Q and K to
INT8 makes scores uncertain by dozens of such units, and larger steps than this take more digits
than floats near 3 * 2^22 times the step have."""


# Registers of the PTX below, for an accumulator of n registers a thread: $0 to $4n-1 are
#
#     $0 .. n-1    $n .. 2n-1    $2n .. 3n-1    $3n .. 4n-1
#     acc, out     packed, out   acc, in        packed, in
#
# `packed` has what a thread knows of its two rows in its first eight registers (the others repeat
# them and are not read):
#
#     register     0      1      2      3      4      5      6      7
#     row          upper  upper  lower  lower  upper  upper  lower  lower
#     in           score  m_i    score  m_i    scale  l_i    scale  l_i
#     out          sub    m_i    sub    m_i    mul    l_i    mul    l_i
#
# Of `acc`, registers 0 and 1 of every four are of the upper row, 2 and 3 of the lower one.


def _ptx(value: float) -> str:
    """A 32-bit float as PTX writes it."""
    return f"0f{struct.unpack('I', struct.pack('f', value))[0]:08X}"


def _rescale_asm(registers: int) -> str:
    """Multiply a thread's accumulator by its rows' factors where a lane of the warp has one.

    Operands: results, accumulators, factors; registers come in pairs, upper row and lower row.
    """
    n = registers
    lines = [
        "{ .reg .pred p, q;",
        f"setp.neu.f32 p, ${2 * n}, {_ptx(1.0)};",
        f"setp.neu.or.f32 p, ${2 * n + 2}, {_ptx(1.0)}, p;",
        "vote.sync.any.pred q, p, 0xffffffff;",
        *(f"mov.b32 ${i}, ${n + i};" for i in range(n)),
        "@!q bra SAME_MAXIMUM;",
        *(f"mul.f32 ${i}, ${i}, ${2 * n + (i & 2)};" for i in range(n)),
        "SAME_MAXIMUM:",
        "}",
    ]
    return "\n".join(lines)


_ROWS = ((0, 1, 4, 5), (2, 3, 6, 7))
"""Of the upper and the lower row of a thread: registers of its highest score, its maximum, the log2
units of a score and its sum, among those that `_packed` fills."""

_START, _STEEPEST, _OFFSET = _ptx(FLOAT_START.value), _ptx(STEEPEST.value), _ptx(-OFFSET.value)


def _reached(row: int, score: str, factor: str, *, integers: bool) -> list[str]:
    """A score in log2 units."""
    if integers:
        return [f"sub.f32 t, {score}, {_START};", f"mul.f32 top{row}, t, {factor};"]
    return [f"mul.f32 top{row}, {score}, {factor};"]


def _passes(to: int, of: int, *, integers: bool) -> list[str]:
    """Whether a lane of the warp has a score that passes a maximum by the headroom."""
    lines = []
    for row, (score, top, factor, _) in enumerate(_ROWS):
        joined, also = (".or", ", p") if row else ("", "")
        lines += [
            *_reached(row, f"${of + score}", f"${of + factor}", integers=integers),
            f"add.f32 t, ${of + top}, {_ptx(HEADROOM)};",
            f"setp.gt{joined}.f32 p, top{row}, t{also};",
        ]
        if integers:  # of steep rows the highest score is where exponents start from
            lines += [
                f"setp.gt.or.f32 p, ${of + factor}, {_STEEPEST}, p;",
                f"min.NaN.f32 ${to + factor}, ${of + factor}, {_STEEPEST};",
            ]
        else:
            lines += [f"mov.b32 ${to + factor}, ${of + factor};"]
    return [*lines, "vote.sync.any.pred q, p, 0xffffffff;"]


def _stay(to: int, of: int, *, integers: bool) -> list[str]:
    """Results where it does not."""
    lines = []
    for score, top, factor, total in _ROWS:
        lines += [
            f"mov.b32 ${to + top}, ${of + top};",
            f"mov.b32 ${to + total}, ${of + total};",
            f"add.f32 ${to + score}, ${of + top}, {_OFFSET};",
        ]
        if integers:
            lines += [f"fma.rn.f32 ${to + score}, ${to + factor}, {_START}, ${to + score};"]
    return lines


def _agree(of: int) -> list[str]:
    """The highest scores of rows, from those of their four threads."""
    lines = []
    for lanes in (2, 1):
        mine = [
            f"${of + score}" if lanes == 2 else f"high{row}"
            for row, (score, *_) in enumerate(_ROWS)
        ]
        for row in (0, 1):
            lines += [f"shfl.sync.bfly.b32 top{row}, {mine[row]}, {lanes}, 0x1f, 0xffffffff;"]
        for row in (0, 1):
            lines += [f"max.f32 high{row}, {mine[row]}, top{row};"]
    return lines


def _move(to: int, of: int, *, integers: bool) -> list[str]:
    """Results where it does; `top0` and `top1` become the decays of the rows."""
    lines = []
    for row, (score, top, factor, total) in enumerate(_ROWS):
        lines += [
            *_reached(row, f"high{row}", f"${of + factor}", integers=integers),
            f"max.f32 ${to + top}, ${of + top}, top{row};",
            f"sub.f32 t, ${of + top}, ${to + top};",
        ]
        if integers:
            lines += [
                f"sub.f32 ${to + score}, ${to + top}, top{row};",
                f"add.f32 ${to + score}, ${to + score}, {_OFFSET};",
                f"fma.rn.f32 ${to + score}, high{row}, ${to + factor}, ${to + score};",
            ]
        else:
            lines += [f"add.f32 ${to + score}, ${to + top}, {_OFFSET};"]
        lines += [
            f"ex2.approx.ftz.f32 top{row}, t;",
            f"mul.f32 ${to + total}, ${of + total}, top{row};",
        ]
    return lines


def _settle_asm(registers: int, *, integers: bool) -> str:
    """Move maxima where a lane of the warp has a score that passes one by the headroom.

    Operands: accumulators and what rows have, as results, then the same as inputs. Of the latter
    `_ROWS` tells the registers that count: as results what exponents subtract, the maximum, what
    multiplies scores, the sum.
    """
    n, acc = registers, range(registers)
    to, of = n, 3 * n
    lines = [
        "{ .reg .pred p, q; .reg .f32 t, high0, high1, top0, top1;",
        *_passes(to, of, integers=integers),
        *_stay(to, of, integers=integers),
        *(f"mov.b32 ${i}, ${2 * n + i};" for i in acc),
        "@!q bra SETTLED;",
        *_agree(of),
        *_move(to, of, integers=integers),
        *(f"mul.f32 ${i}, ${i}, top{i >> 1 & 1};" for i in acc),
        "SETTLED:",
        "}",
    ]
    return "\n".join(lines)


def _operands(in_place: int, early: int, unused: int, inputs: int) -> str:
    """Constraints of results, and of inputs.

    Args:
        in_place: results that replace an input.
        early: results that are written before all inputs are read.
        unused: results that are not written.
        inputs: inputs.
    """
    return ",".join(["=f"] * in_place + ["=&f"] * early + ["=f"] * unused + ["f"] * inputs)


RESCALE_64 = gl.constexpr(_rescale_asm(64))
RESCALE_64_OPERANDS = gl.constexpr(_operands(64, 0, 0, 128))
RESCALE_32 = gl.constexpr(_rescale_asm(32))
RESCALE_32_OPERANDS = gl.constexpr(_operands(32, 0, 0, 64))
SETTLE_64 = gl.constexpr(_settle_asm(64, integers=True))
SETTLE_64_FLOATS = gl.constexpr(_settle_asm(64, integers=False))
SETTLE_64_OPERANDS = gl.constexpr(_operands(64, 8, 56, 128))
SETTLE_32 = gl.constexpr(_settle_asm(32, integers=True))
SETTLE_32_FLOATS = gl.constexpr(_settle_asm(32, integers=False))
SETTLE_32_OPERANDS = gl.constexpr(_operands(32, 8, 24, 64))


@gluon.jit
def in_lanes(row, like):
    """A vector of rows as `(64, 4)` numbers of threads, with the layout of others."""
    L: gl.constexpr = like.type.layout
    column = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L), assert_trivial=True), 1)
    _, lanes = gl.broadcast(like, column)
    return lanes


@gluon.jit
def spread(x, tile):
    """`(64, 4)` numbers of threads over the elements of a tile `(64, N)`."""
    L: gl.constexpr = tile.type.layout
    N: gl.constexpr = tile.shape[1]
    parts = tile.reshape([64, N // 8, 4, 2])
    L_P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    x = gl.expand_dims(gl.expand_dims(gl.convert_layout(x, L_P, assert_trivial=True), 1), 3)
    _, x = gl.broadcast(parts, x)
    return gl.convert_layout(x.reshape([64, N]), L, assert_trivial=True)


@gluon.jit
def highest_of_thread(x, like):
    """`(64, 4)`: the largest number that each thread holds of a row of `(64, N)`.

    Four chains of maxima run side by side.
    """
    L: gl.constexpr = like.type.layout
    N: gl.constexpr = x.shape[1]
    parts = x.reshape([64, 2, N // 16, 4, 2])
    highest = gl.max(gl.max(gl.max(parts, 2), 1), 2)
    return gl.convert_layout(highest, L, assert_trivial=True)


@gluon.jit
def rescaled(acc, decay, DP: gl.constexpr):
    """The accumulator times its rows' decay, for nothing where no maximum of the warp moved."""
    factor = spread(decay, acc)
    if DP == 128:
        return gl.inline_asm_elementwise(
            RESCALE_64, RESCALE_64_OPERANDS, [acc, factor], dtype=gl.float32, is_pure=False,
            pack=64,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            RESCALE_32, RESCALE_32_OPERANDS, [acc, factor], dtype=gl.float32, is_pure=False,
            pack=32,
        )  # fmt: skip


@gluon.jit
def _packed(x0, x1, x2, x3, tile):
    """Four numbers of each thread and row as the registers of a tile, over and over."""
    L: gl.constexpr = tile.type.layout
    N: gl.constexpr = tile.shape[1]
    four = gl.join(gl.join(x0, x1), gl.join(x2, x3)).permute([0, 3, 1, 2])
    parts = tile.reshape([64, N // 16, 2, 4, 2])
    L_P: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    four = gl.expand_dims(gl.convert_layout(four, L_P, assert_trivial=True), 1)
    _, four = gl.broadcast(parts, four)
    return gl.convert_layout(four.reshape([64, N]), L, assert_trivial=True)


@gluon.jit
def _first_half(x, N: gl.constexpr):
    """The first N of `(64, 2 N, 2, 4, 2)`."""
    first, _ = gl.split(x.reshape([64, 2, N, 2, 4, 2]).permute([0, 2, 3, 4, 5, 1]))
    return first


@gluon.jit
def _unpacked(tile, L: gl.constexpr):
    """The first four numbers of `_packed`."""
    N: gl.constexpr = tile.shape[1]
    x = tile.reshape([64, N // 16, 2, 4, 2])
    if N == 128:
        x = _first_half(x, 4)
    x = _first_half(_first_half(x, 2), 1)
    low, high = gl.split(x.reshape([64, 2, 4, 2]).permute([0, 2, 3, 1]))
    x0, x1 = gl.split(low)
    x2, x3 = gl.split(high)
    x0 = gl.convert_layout(x0, L, assert_trivial=True)
    x1 = gl.convert_layout(x1, L, assert_trivial=True)
    x2 = gl.convert_layout(x2, L, assert_trivial=True)
    x3 = gl.convert_layout(x3, L, assert_trivial=True)
    return x0, x1, x2, x3


@gluon.jit
def settled(acc, l, highest, m, scale, DP: gl.constexpr, FROM_BITS: gl.constexpr):
    """Maxima of rows with a block's scores, and totals rescaled where one moved.

    Args:
        acc: `(64, DP)` accumulator.
        l: `(64, 4)` row sums; the following likewise.
        highest: score of each thread and row, with `FROM_BITS` as `FLOAT_START` and more.
        m: maxima.
        scale: log2 units of a score.
        DP: channels.
        FROM_BITS: whether scores count up from the bits of `FLOAT_START`.

    Returns:
        Accumulator, row sums, maxima, what multiplies scores (with `FROM_BITS` `STEEPEST` at most),
        and what is subtracted from the product.
    """
    L: gl.constexpr = l.type.layout
    packed = _packed(highest, m, scale, l, acc)
    if DP == 128:
        acc, packed = gl.inline_asm_elementwise(
            SETTLE_64 if FROM_BITS else SETTLE_64_FLOATS, SETTLE_64_OPERANDS, [acc, packed],
            dtype=(gl.float32, gl.float32), is_pure=False, pack=64,
        )  # fmt: skip
    else:
        acc, packed = gl.inline_asm_elementwise(
            SETTLE_32 if FROM_BITS else SETTLE_32_FLOATS, SETTLE_32_OPERANDS, [acc, packed],
            dtype=(gl.float32, gl.float32), is_pure=False, pack=32,
        )  # fmt: skip
    sub, m, mul, l = _unpacked(packed, L)
    return acc, l, m, mul, sub
