"""Gluon code of the Hopper kernels: from scores in registers to the weights that multiply V.

A warpgroup holds 64 rows; a thread holds two of them, each shared by four threads. FP8 weights are
kept as 32-bit words of four numbers in the order in which a product reads them (an FP8 tensor that
crosses a loop would be shuffled byte by byte); fp16 weights are fp32 numbers until then.
"""

from __future__ import annotations

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import gl, gluon
from sage_plugin.kernels.attention.backends.hopper.running_max import spread
from sage_plugin.kernels.quantize.recipe import LINEAR_SHIFT

PACK = gl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"
)


def _linear_asm() -> str:
    """Four FP8 numbers whose bits are their exponents' linear part, as one word.

    `a*s + b` is one less the number's bits over 256: in [1/2, 1] the third byte of a float counts
    256ths down from 0x80, and the saturating product clamps the bits at zero for nothing. Operands:
    word, four scores, a, b.
    """
    lines = ["{ .reg .f32 y; .reg .b32 t0, t1, t2, t3;"]
    for i in range(4):
        lines += [f"fma.rn.sat.f32 y, ${1 + i}, $5, $6;", f"mov.b32 t{i}, y;"]
    lines += [
        "prmt.b32 t0, t0, t1, 0x0062;",
        "prmt.b32 t2, t2, t3, 0x0062;",
        "prmt.b32 t0, t0, t2, 0x5410;",
        "sub.u32 $0, 0x80808080, t0; }",
    ]
    return "\n".join(lines)


LINEAR = gl.constexpr(_linear_asm())
LINEAR_START = gl.constexpr(1.0 - (8 * 7.0 - LINEAR_SHIFT - 0.5) / 256.0)
"""Of a weight of 2^0: 56 are the bits of 1.0, and a half makes the nearest of the number above."""


@gluon.jit
def _quads(x, BN: gl.constexpr):
    """`(64, BN)` to the four parts of a word, `(64, BN // 16, 4)` each."""
    parts = x.reshape([64, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    even, odd = gl.split(parts)
    even_low, even_high = gl.split(even)
    odd_low, odd_high = gl.split(odd)
    return even_low, odd_low, even_high, odd_high


@gluon.jit
def _halves(x, N: gl.constexpr):
    """The first and the second half of N groups of keys."""
    return gl.split(x.reshape([64, 2, N // 2, 4]).permute([0, 2, 3, 1]))


@gluon.jit
def _words(s0, s1, s2, s3, mul, sub, N: gl.constexpr, LINEAR_GROUPS: gl.constexpr):
    """Words of `2^(s * mul - sub)` for N groups of 16 keys, the last ones by the linear rule."""
    if LINEAR_GROUPS == 0:
        p0 = gl.exp2(s0 * mul - sub)
        p1 = gl.exp2(s1 * mul - sub)
        p2 = gl.exp2(s2 * mul - sub)
        p3 = gl.exp2(s3 * mul - sub)
        return gl.inline_asm_elementwise(
            PACK, "=r,f,f,f,f", [p0, p1, p2, p3], dtype=gl.int32, is_pure=False, pack=1
        )
    elif LINEAR_GROUPS == N:
        slope = mul * -0.03125
        rounding = gl.maximum(mul * 1.5 - 0.05, 0.0)  # of huge scores, which must not pass 448
        start = (sub + rounding) * 0.03125 + LINEAR_START
        return gl.inline_asm_elementwise(
            LINEAR, "=r,f,f,f,f,f,f", [s0, s1, s2, s3, slope, start], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        M: gl.constexpr = N // 2
        LATE: gl.constexpr = M if LINEAR_GROUPS > M else LINEAR_GROUPS
        a0, b0 = _halves(s0, N)
        a1, b1 = _halves(s1, N)
        a2, b2 = _halves(s2, N)
        a3, b3 = _halves(s3, N)
        a_mul, b_mul = _halves(mul, N)
        a_sub, b_sub = _halves(sub, N)
        first = _words(a0, a1, a2, a3, a_mul, a_sub, M, LINEAR_GROUPS - LATE)
        second = _words(b0, b1, b2, b3, b_mul, b_sub, M, LATE)
        L: gl.constexpr = first.type.layout
        second = gl.convert_layout(second, L, assert_trivial=True)
        return gl.join(first, second).permute([0, 3, 1, 2]).reshape([64, N, 4])


@gluon.jit
def _of_words(x, words):
    """`(64, 4)` numbers of threads for words `(64, BN // 16, 4)`."""
    L: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    _, x = gl.broadcast(words, gl.expand_dims(gl.convert_layout(x, L, assert_trivial=True), 1))
    return x


@gluon.jit
def weights(s, mul, sub, BN: gl.constexpr, LINEAR_GROUPS: gl.constexpr):
    """`(64, BN // 4)` words of the weights `2^(s * mul - sub)`.

    Args:
        s: `(64, BN)` fp32 scores in the layout of a product's result.
        mul: `(64, 4)` factors, a number a thread and row.
        sub: what is taken from exponents, likewise.
        BN: keys.
        LINEAR_GROUPS: how many groups of 16 keys, the last ones, go by the linear rule.
    """
    s0, s1, s2, s3 = _quads(s, BN)
    mul = _of_words(mul, s0)
    sub = _of_words(sub, s0)
    words = _words(s0, s1, s2, s3, mul, sub, BN // 16, LINEAR_GROUPS)
    return words.reshape([64, BN // 4])


@gluon.jit
def fp8_operand(words, L: gl.constexpr, BN: gl.constexpr):
    """The first operand of a product, of layout `L`, from words of weights; no instruction."""
    c0 = words.to(gl.int8)
    c1 = (words >> 8).to(gl.int8)
    c2 = (words >> 16).to(gl.int8)
    c3 = (words >> 24).to(gl.int8)
    keys = gl.join(gl.join(c0, c1), gl.join(c2, c3)).permute([0, 1, 3, 2]).reshape([64, BN])
    return gl.convert_layout(keys.to(gl.float8e4nv, bitcast=True), L, assert_trivial=True)


@gluon.jit
def half_weights(s, mul, sub):
    """Weights `2^(s * mul - sub)` as fp32 numbers, with `mul` and `sub` as in `weights`."""
    return gl.exp2(s * spread(mul, s) - spread(sub, s))


@gluon.jit
def half_operand(p, L: gl.constexpr):
    """The first operand of an fp16 product, of layout `L`, from weights; only the rounding."""
    return gl.convert_layout(p.to(gl.float16), L, assert_trivial=True)


@gluon.jit
def partial_sums(x):
    """Sums of fp32 weights over the keys that a thread holds of a row, `(64, 4)`."""
    N: gl.constexpr = x.shape[1] // 8
    return gl.sum(gl.sum(x.reshape([64, N, 4, 2]), 3), 1)
