"""The features of an attention call: a row each, with the numbers of the reports that ask."""

from __future__ import annotations

import dataclasses
import math

import torch

from tests.kernels.calls import QUANTIZED, Shape
from tests.matrix import masks
from tests.matrix.masks import bias, expanded, floats, keeping
from tests.matrix.row import (
    LARGE,
    SMALL,
    Case,
    Row,
    alternating,
    beside_nan,
    beyond_the_diagonal,
    contiguous,
    heads_repeated,
    loud_thirds,
    louder,
    mask_orders,
    means_of_heads,
    narrowed,
    other_units,
    padded_scale,
    padding_filled,
    scaled,
    sharper,
    signs,
    top_left,
    with_outliers,
    with_value,
    without,
    without_bias,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CAUSAL = {"is_causal": True}
ALL = {"is_causal": True, "window": (30, -1), "softcap": 8.0}


def short(dtype: torch.dtype) -> str:
    """Return the name of a type."""
    return str(dtype).removeprefix("torch.")


def sinks(*levels: float, dtype: torch.dtype = FP32):
    """One logit per query head, made from the shape of a call."""
    return lambda shape: torch.tensor(levels * shape.heads_q)[: shape.heads_q].to(dtype)


def lengths(seq_q: int, seq_k: int, dim: int = 32, heads: tuple[int, int] = (1, 1)) -> Shape:
    """A shape by its lengths."""
    return Shape(1, *heads, seq_q, seq_k, dim)


MASKS = [
    *(Row(f"bool of {form}", (35,), mask=keeping(form)) for form in masks.FORMS),
    *(Row(f"bias of {form}", (35,), mask=bias(form)) for form in masks.FORMS),
    *(
        Row(f"expanded from {form}", (35,), mask=expanded(keeping(form)), same=narrowed)
        for form in ("keys of each item", "rows and keys", "rows alone")
    ),
    Row("bias in the dtype of bf16 tensors", (35,), mask=bias("keys", dtype=BF16), dtype=BF16),
    Row("tiles hidden, plain and mixed", (13,), mask=masks.tiles(each=True), everywhere=True),
    *(
        Row(f"the same tiles in row blocks of {block}", (13,), Shape(1, 2, 1, 70, 80, 32),
            Shape(1, 4, 2, 500, 600, 64), masks.tiles(tile=64), launch={"block_m": block})
        for block in (16, 128)
    ),
    *(
        Row(f"last key hidden, {form}, {kind}", (32,), mask=how(masks.all_but_last(form)),
            change=with_value("v", (..., -1, slice(None)), 1e3), wrong=without("mask"))
        for form in ("keys of each item", "rows and keys")
        for kind, how in (("bool", lambda mask: mask), ("float", floats))
    ),
    Row("left padding under causal", (34, 41), Shape(2, 2, 1, 20, 40, 32), mask=masks.left_padding,
        options=CAUSAL),
    *(
        Row(f"bias in natural-log units, {form}", (36,), mask=masks.every_second(form), times=2,
            change=louder, wrong=other_units)
        for form in ("keys", "rows and keys")
    ),
    *(
        Row(f"rows and blocks without keys, {kind}", (37,), Shape(1, 2, 1, 20, 140, 32),
            mask=how(masks.holes), times=4)
        for kind, how in (("bool", lambda mask: mask), ("float", floats),
                          ("bf16", lambda mask: floats(mask, dtype=BF16)))
    ),
    Row("an item without keys", (37,), mask=masks.nobody_first),
    *(
        Row(f"{lowest:.0e} for -inf, {form}, {short(dtype)}", (39,),
            dtype=BF16 if dtype == BF16 else FP16, mask=floats(keeping(form), lowest, dtype))
        for form, lowest, dtype in (
            ("keys of each item", torch.finfo(BF16).min, BF16), ("rows of each item", -1e4, FP16),
            ("rows and keys", torch.finfo(FP32).min, FP32), ("keys", -1e30, FP32),
        )
    ),
    *(
        Row(f"all kinds of low biases, {short(dtype)}", (37, 39), Shape(1, 2, 2, 6, 160, 64), None,
            mask=masks.staircase(dtype))
        for dtype in (FP16, BF16, FP32)
    ),
    Row("-1e4 for all keys", (39,), mask=masks.constant(-1e4, FP16)),
    Row("the lowest number for all keys", (39,), mask=masks.constant(-3.3e38, BF16)),
    Row("biases at the threshold", (39,), Shape(1, 1, 1, 3, 20, 64), None, mask=masks.threshold,
        options={"scale": 0.0}),
    *(
        Row(f"causal and a mask of {form}, {seq_q} rows", (41,), Shape(2, 2, 1, seq_q, seq_k, 32),
            Shape(2, 4, 2, 10 * seq_q, 10 * seq_k, 64), keeping(form), CAUSAL, change=louder,
            wrong=without("mask", "is_causal"))
        for form, seq_q, seq_k in (("keys of each item", 20, 40), ("rows of each item", 40, 20))
    ),
    Row("padding may hold anything", (41,), mask=masks.padding, options=CAUSAL, same=padding_filled,
        everywhere=True),
]  # fmt: skip

TILED = Shape(2, 2, 1, 70, 106, 32)
TILES = [
    *(
        Row(f"tiles under {name}", (), TILED, mask=masks.tiles(each=True), options=position)
        for name, position in {
            "causal": CAUSAL, "a window": {"window": (40, 25)},
            "a causal window": {"window": (33, -1), "is_causal": True},
        }.items()
    ),
    *(
        Row(f"tiles that add, {name}", (36,), Shape(1, 2, 1, 70, 106, 32), None,
            mask=masks.adding_tiles, options=options, wrong=without_bias, change=louder)
        for name, options in {
            "all": {}, "causal": CAUSAL, "a window": {"window": (40, 25)},
            "cap and sinks": {"softcap": 6.0, "sinks": sinks(-1.0, 2.0)},
        }.items()
    ),
    *(
        Row(f"{kind} of {form} in every memory order", (), mask=make(form), same=mask_orders,
            options=CAUSAL)
        for form, kind, make in (
            ("rows of each item", "bool", keeping), ("rows of each head", "bias", bias),
        )
    ),
    Row("mask values out of reach", (), Shape(1, 2, 2, 70, 70, 32), mask=bias("rows and keys"),
        options=CAUSAL, same=beyond_the_diagonal, everywhere=True),
    *(
        Row(f"a mask that {heads} heads share", (), Shape(1, heads, heads, 40, 70, 32),
            mask=masks.tiles(), kernels=("fav2", "sage"), options={"is_causal": heads == 5})
        for heads in (1, 5, 7)
    ),
    *(
        Row(f"{kind} in tiles of {block} keys", (), Shape(1, 2, 1, 70, 300, 32), kernels=kernels,
            mask=how(masks.tiles(tile=128)), launch={"block_m": 64, "block_n": block})
        for block, kernels in ((64, ("sage",)), (128, ("fav3_sage",)))
        for kind, how in (("bool", lambda mask: mask), ("float", floats))
    ),
    # Scales so small that a product of two is 0, and hidden scores far above all others, which
    # cost those in their blocks many digits: it is the emulation that these are held to.
    *(
        Row(f"hidden scores are large, all times {factor}", (), Shape(1, 2, 2, 64, 96, 32),
            dtype=FP32, mask=masks.without_thirds, launch={"smooth_k": False}, kernels=QUANTIZED,
            change=loud_thirds(factor), times=60, large=None)
        for factor in (1e-25, 1.0)
    ),
]  # fmt: skip

POSITIONS = [
    *(
        Row(f"window {window}{' causal' * causal}", mask=None, change=louder, times=4,
            options={"window": window, "is_causal": causal},
            wrong=without("window") if max(window) < 30 else lambda case: ())
        for window, causal in (
            ((8, 3), False), ((0, 0), False), ((-1, 2), False), ((5, -1), True), ((4, 4), True),
            ((100, 500), False), ((20, -1), True),
        )
    ),
    Row("a window of more rows than keys", (), lengths(70, 40), options={"window": (4, -1)}),
    Row("a window of one row", (), lengths(1, 50), None, options={"window": (7, 3)}),
    *(
        Row(f"causal, {seq_q} rows and {seq_k} keys", (17,), lengths(seq_q, seq_k), on_gpu,
            options=CAUSAL, change=louder, wrong=top_left, times=2)
        for seq_q, seq_k, on_gpu in (
            (5, 12, None), (12, 5, None), (35, 80, lengths(390, 1170, 64)),
        )
    ),
    *(
        Row(f"{seq_q} rows and {seq_k} keys{' causal' * causal}", (16, 31),
            lengths(seq_q, seq_k, 96), lengths(*large, 96, (2, 2)), options={"is_causal": causal},
            times=2)
        for seq_q, seq_k, large, causal in (
            (10, 40, (200, 777), False), (40, 33, (777, 200), True), (9, 64, (2048, 8192), True),
        )
    ),
]  # fmt: skip

SCORES = [
    *(
        Row(f"cap {cap}", (54,), options={"softcap": cap}, times=4, wrong=without("softcap"))
        for cap in (0.5, 3.0)
    ),
    Row("a wide cap that is an integer", (54,), options={"softcap": 50}),
    Row("cap, causal and a bias", (54,), mask=bias("rows of each item"),
        options={"softcap": 3.0, "is_causal": True}, times=4),
    Row("a cap beside a mean of K", (54,), options={"softcap": 20.0, **CAUSAL}, times=2,
        change=lambda case: case.but(k=case.k * 0.1 + 50.0)),
    # The sign of a score near 0 decides between two weights: only a small cap keeps that near.
    Row("scores three times a wide cap", (54,), SMALL, None, options={"softcap": 30.0}, dtype=FP32,
        change=scaled(q=50.0), times=24),
    Row("scores a hundred times the cap", (54,), options={"softcap": 0.5}, dtype=FP32,
        change=scaled(q=50.0), times=4),
    *(
        Row(f"sinks of {levels}", (), options={"sinks": sinks(*levels)}, times=3)
        for levels in ((-3.0, 1.0, 4.0, 9.0), (-math.inf, 90.0), (-5.0,))
    ),
    Row("sinks in bf16", (), options={"sinks": sinks(-3.0, 4.0, dtype=BF16)}),
    Row("sinks and rows without keys", (), mask=masks.holes,
        options={"sinks": sinks(-2.0, 3.0), "window": (30, -1)}),
    Row("sinks beside means of K and V", (), options={"sinks": sinks(3.0, 5.0)}, times=2.5,
        change=lambda case: case.but(k=case.k + 1.0, v=case.v * 0.1 + 10.0)),
    Row("all at once", (), mask=bias("rows of each head"), times=4, everywhere=True,
        options={**ALL, "sinks": sinks(-1.0, 1.0), "scale": 0.2}),
    *(
        Row(f"scale {scale}", (94,), options={"scale": scale}, times=10 if scale else 3,
            change=louder, wrong=without("scale"))
        for scale in (0.5, 0.0, -0.25)
    ),
]  # fmt: skip

SHAPES = [
    *(
        Row(f"blocks of {m} rows and {n} keys", (12,), lengths(40, 150),
            Shape(1, 4, 2, 700, 900, 64), times=1.5,
            launch={"block_m": m, "block_n": n, "num_stages": 1, "num_warps": 8 if m > 64 else 4})
        for m, n in ((16, 32), (32, 256), (64, 64), (128, 128), (256, 32))
    ),
    *(
        Row(f"{seq_q} rows and {seq_k} keys", (15,), lengths(seq_q, seq_k),
            lengths(seq_q, 16 * seq_k, 64, (16, 16)))
        for seq_q, seq_k in ((1, 1), (1, 7), (1, 65), (2, 63), (15, 7), (16, 64), (17, 65))
    ),
    *(
        Row(f"{seq} rows and keys", (30,), lengths(seq, seq), None, times=4) for seq in (1, 3, 5, 8)
    ),
    *(
        Row(f"{seq_k} keys in blocks of {block} beside NaN", (22, 23), lengths(16, seq_k), None,
            launch={"block_m": 16, "block_n": block, "num_stages": 1}, change=beside_nan,
            same=contiguous, everywhere=seq_k > block)
        for block in (32, 64, 128, 256)
        for seq_k in (1, block - 1, block + 1)
    ),
    *(
        Row(f"head dim {dim}", (19,), lengths(20, 40, dim), Shape(1, 4, 2, 300, 500, dim), times=2,
            wrong=padded_scale, change=sharper)
        for dim in (8, 16, 24, 40, 48, 72, 80, 88, 96, 104, 120)
    ),
    # Errors of few channels do not average out.
    *(
        Row(f"head dim {dim}", (18,), lengths(20, 40, dim), Shape(1, 2, 2, 300, 500, dim),
            times=3 if dim > 8 else 6)
        for dim in (1, 3, 160, 256)
    ),
    Row("the smallest call of a report", (67,), Shape(1, 1, 1, 5, 5, 5), None, dtype=FP32, times=4),
    *(
        Row(f"{heads_q} heads over {heads_k}", (25, 26), Shape(1, heads_q, heads_k, 9, 30, 32),
            Shape(2, heads_q, heads_k, 300, 400, 64), change=means_of_heads, same=heads_repeated,
            launch={"block_m": 32, "block_n": 32})
        for heads_q, heads_k in ((2, 2), (4, 2), (3, 1), (6, 2))
    ),
]  # fmt: skip

NUMBERS = [
    # That no tensor of the caller is written is asked of every row; smoothing did so to this K.
    Row("a mean of K to be taken off", (60,), dtype=FP32, times=4,
        change=lambda case: case.but(k=case.k + 596.0)),
    *(
        Row("-".join(map(short, dtypes)), (89, 90), times=2,
            dtype=dtypes)
        for dtypes in (
            (FP32, FP32, BF16), (FP32, FP32, FP16), (FP32, FP32, FP32), (FP16, FP16, BF16),
            (BF16, BF16, FP16), (FP32, FP16, FP16), (BF16, FP32, BF16),
        )
    ),
    *(
        Row(f"values of {value:.0e}{', mean of V apart' * smooth}", (46,), lengths(16, 64),
            dtype=BF16, launch={"block_n": 64, "smooth_v": smooth}, change=alternating(value))
        for value, smooth in ((7e4, False), (1e5, True), (2000.0, False), (2000.0, True))
    ),
    *(
        Row(f"{name} of {value:.0e}", (49,), lengths(16, 64), dtype=BF16, change=signs(name, value))
        for name in "qkv"
        for value in (0.0, 1e-30, 1e-39)
    ),
    *(
        Row(f"values of {size:.0e} keep their digits", (49,), lengths(16, 64), dtype=BF16,
            launch={"smooth_v": smooth}, change=scaled(v=size))
        for size, smooth in ((1e-4, True), (1e-6, False), (1e-8, True))
    ),
    *(
        Row(f"a block of zeros in {name}", (49,), Shape(1, 1, 1, 20, 130, 32),
            Shape(1, 4, 2, 256, 512, 64), times=4,
            change=with_value(name, (..., slice(64, 128), slice(None)), 0.0),
            launch={"block_n": 64, "smooth_k": smooth, "smooth_v": smooth})
        for name, smooth in (("k", False), ("v", True))
    ),
    Row("largest values of fp32", (), dtype=FP32, kernels=QUANTIZED, change=alternating(3.3e38),
        truncated=2e-3),
    # It sums before it divides, as SDPA does.
    Row("large values of fp32", (), dtype=FP32, kernels=("fav2",), change=alternating(1e36)),
    *(
        Row(f"products beyond fp16, scale {scale:.0e}", (51,), lengths(16, 64),
            options={"scale": scale}, change=scaled(q=5e3, k=2e3))
        for scale in (1e-8, 3e-9)
    ),
    *(
        Row(f"means {'apart' if k else 'in place'}, {seq_k} keys", (61,), lengths(16, seq_k), None,
            launch={"block_m": 32, "block_n": 32, "smooth_k": k, "smooth_v": v},
            times=3 if k else 8)  # K keeps a mean that is larger than what varies
        for seq_k, k, v in (
            (1, True, True), (9, False, False), (9, True, False), (100, False, True),
        )
    ),
    Row("outlying means of channels of K", (56,), lengths(20, 100, 128),
        Shape(1, 4, 4, 300, 4000, 128), dtype=FP32, change=with_outliers(16, 50.0, 2.0)),
    *(
        Row(f"{name} in every option of the quantizers", (), mask=bias("keys"), launch=fields,
            options={**ALL, "sinks": sinks(-1.0, 1.0)}, kernels=QUANTIZED, times=8)
        for name, fields in {
            "rotation": {"hadamard": 32},
            "rotation and granules": {"hadamard": 16, "q_granule": 16},
            "K as it is": {"smooth_k": False, "q_granule": 32},
            "V as it is": {"smooth_v": False},
            "descriptors": {"loads": "descriptor", "hadamard": 16},
        }.items()
    ),
]  # fmt: skip


def _unbound(case: Case) -> Case:
    """Q, K and V of one buffer, as a fused projection makes them."""
    q, k, v = torch.stack([case.q, case.k, case.v], 3).unbind(3)
    return case.but(q=q, k=k, v=v)


def _chunks(case: Case) -> Case:
    """Thirds of a row of a linear layer, viewed as heads."""
    batch, heads, seq, dim = case.q.shape
    rows = [x.transpose(1, 2).reshape(batch, seq, -1) for x in (case.q, case.k, case.v)]
    q, k, v = (
        x.view(batch, seq, heads, dim).transpose(1, 2) for x in torch.cat(rows, -1).chunk(3, -1)
    )
    return case.but(q=q, k=k, v=v)


def _turned(*dims: int):
    """The same numbers with other dimensions innermost."""
    back = [dims.index(dim) for dim in range(4)]
    return lambda case: case.each(lambda x: x.permute(dims).contiguous().permute(back))


def _first_head(case: Case) -> Case:
    return case.each(lambda x: x[:, :1].expand(x.shape))


def _first_row(case: Case) -> Case:
    return case.each(lambda x: x[:, :, :1].expand(x.shape))


def _every_second(case: Case) -> Case:
    return case.each(lambda x: torch.stack([x, x * 0 + 7], 4)[..., 0])


def _stray_stride(case: Case) -> Case:
    """One item, whose stride between items is beyond any memory."""
    return case.each(lambda x: x[:1].as_strided((1, *x.shape[1:]), (2**40 + 3, *x.stride()[1:])))


ORDERS = [
    Row(name, numbers, Shape(2, 2, 2, 20, 20, 32), Shape(2, 3, 3, 130, 130, 64), change=change,
        same=contiguous)
    for name, numbers, change in (
        ("one fused buffer", (5, 8), _unbound),
        ("chunks of a linear layer", (8,), _chunks),
        ("rows before heads", (6,), _turned(0, 2, 1, 3)),
        ("channels before rows", (6,), _turned(0, 1, 3, 2)),
        ("items innermost", (6,), _turned(1, 2, 3, 0)),
        ("every second number", (6,), _every_second),
        ("shared heads", (6,), _first_head),
        ("shared rows", (6,), _first_row),
        ("a stray stride of one item", (6,), _stray_stride),
    )
]  # fmt: skip

_EVERY = [*MASKS, *TILES, *POSITIONS, *SCORES, *SHAPES, *NUMBERS, *ORDERS]
ROWS = [
    dataclasses.replace(row, large=dataclasses.replace(LARGE, dim=(64, 128, 40)[at % 3]))
    if row.large is LARGE and "hadamard" not in row.launch
    else row
    for at, row in enumerate(_EVERY)
]
"""All rows; on a GPU, those that ask for no shape have three head dims in turn."""
