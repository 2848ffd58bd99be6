"""The Gluon kernel on an H100: every field of its config, drifting values, NaN, extremes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import sage_plugin
from sage_plugin import device
from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from tests.gpu.pairs import pairwise
from tests.gpu.variants import config_of, poison
from tests.kernels.calls import FP8_WEIGHTS, HOPPER, relative_l1

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or device.facts("cuda").arch != "sm_90",
        reason="needs a GPU of sm_90",
    ),
]

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 1000)
DIMS = (33, 40, 64, 80, 96, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAUSAL = {"full": False, "causal": True}


def inputs(shape, dtype=torch.bfloat16, seed=0):
    """Q, K with a bias, and V with a mean, by batch, heads, lengths and head dim."""
    batch, heads_q, heads_k, seq_q, seq_k, dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(heads, seq):
        return torch.randn(batch, heads, seq, dim, generator=generator, device="cuda")

    q, k, v = draw(heads_q, seq_q), draw(heads_k, seq_k) + 2.0, draw(heads_k, seq_k) + 0.5
    return q.to(dtype), k.to(dtype), v.to(dtype)


def both(kernel, q, k, v, *, mask=None, causal=False, fields=None, **options):
    """Output and LSE of the Gluon kernel and of the emulation, by one launch config."""
    config = config_of(kernel, "hopper", q, k, v, mask=mask, causal=causal, **(fields or {}))
    options |= {
        "kernel": kernel, "launch": config, "is_causal": causal, "attn_mask": mask,
        "return_lse": True, "out_dtype": torch.float32,
    }  # fmt: skip
    poison(q)
    made = sage_plugin.attention(q, k, v, variant="hopper", **options)
    return made, sage_plugin.attention(q, k, v, variant="emulation", **options)


def check(made, twin, exact, *, small=2e-4, small_lse=2e-3):
    """The error against the oracle is that of the emulation; dead rows are the oracle's."""
    (out, lse), (twin_out, twin_lse), (right, right_lse) = made, twin, exact
    assert torch.isfinite(out).all()
    dead = torch.isinf(right_lse)
    assert torch.equal(torch.isinf(lse), dead)
    assert (out[dead] == 0).all()
    if not dead.all():
        assert relative_l1(out, right) <= 1.2 * relative_l1(twin_out, right) + small
        limit = 1.5 * (twin_lse - right_lse)[~dead].abs().max().item() + small_lse
        assert (lse - right_lse)[~dead].abs().max().item() <= limit


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_length_on_either_side_of_a_tile(kernel, causal, dim):
    """Rows of a warpgroup, of two and of three; keys of half a block, of one and of more."""
    for seq_q, seq_k in itertools.product(LENGTHS, LENGTHS):
        if (seq_q + seq_k) % 3 == 0 or seq_q == seq_k or 1 in (seq_q, seq_k):
            q, k, v = inputs((1, 2, 1, seq_q, seq_k, dim), seed=seq_q + seq_k)
            made, twin = both(kernel, q, k, v, causal=causal)
            # Few rows have few weights: one that rounds the other way is more than 20 %.
            check(made, twin, oracle(q, k, v, is_causal=causal), small=4e-3, small_lse=0.02)


@pairwise(kernel=HOPPER, dim=DIMS, dtype=DTYPES, mask=["none", "padding", "bias", "one key"],
          causal=CAUSAL)  # fmt: skip
def test_head_dims_dtypes_and_masks_by_key(kernel, dim, dtype, mask, causal):
    shape = (2, 6, 2, 450, 700, dim)
    q, k, v = inputs(shape, dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    given = None
    if mask == "padding":
        given = torch.ones(2, 1, 1, 700, dtype=torch.bool, device="cuda")
        given[0, ..., :130] = given[1, ..., 391:] = False
    elif mask == "bias":
        given = 2 * torch.randn(2, 1, 1, 700, device="cuda", generator=generator)
        given[..., ::5] = -math.inf
    elif mask == "one key":
        given = torch.zeros(1, 1, 1, 700, dtype=torch.bool, device="cuda")
        given[..., 333] = True
    made, twin = both(kernel, q, k, v, mask=given, causal=causal)
    check(made, twin, oracle(q, k, v, mask=given, is_causal=causal))


FIELDS = {
    "exact weights": {"exp_linear": 0},
    "two eighths": {"exp_linear": 2},
    "four eighths": {"exp_linear": 4},
    "six eighths": {"exp_linear": 6},
    "never flushed": {"pv_flush": 0},
    "always flushed": {"pv_flush": 1},
    "flushed at three": {"pv_flush": 3},
    "flushed at eight": {"pv_flush": 8},
    "two warpgroups": {"block_m": 128, "num_warps": 8},
    "half blocks": {"block_n": 64},
    "half blocks, two warpgroups": {"block_m": 128, "num_warps": 8, "block_n": 64},
    "half blocks, six eighths": {"block_n": 64, "exp_linear": 6},
    "half blocks, two eighths": {"block_n": 64, "exp_linear": 2},
    "two stages": {"num_stages": 2},
    "rough": {"smooth_k": False, "smooth_v": False},
    "rough k": {"smooth_k": False},
    "rotated": {"hadamard": 64, "q_granule": 16},
    "a program a tile": {"persistent": False},
}


@pairwise(kernel=FP8_WEIGHTS, fields=FIELDS, dim=[64, 128], causal=CAUSAL)
def test_every_field_of_a_config(kernel, fields, dim, causal):
    q, k, v = inputs((1, 4, 2, 900, 1500, dim))
    made, twin = both(kernel, q, k, v, causal=causal, fields=fields)
    # Tensor cores truncate as they add, which takes a part of sums that V's mean did not leave.
    small = 2e-4 if fields.get("smooth_v", True) else 3e-3
    check(made, twin, oracle(q, k, v, is_causal=causal), small=small, small_lse=6e-3)


@pairwise(kernel=HOPPER, overlap=[False, True], block_m=[128, 192], pv_flush=[0, 1, 8],
          dim=[64, 128], causal=CAUSAL)  # fmt: skip
def test_half_blocks_of_every_kernel(kernel, overlap, block_m, pv_flush, dim, causal):
    q, k, v = inputs((1, 4, 2, 900, 1500, dim))
    fields = {
        "block_m": block_m, "num_warps": block_m // 16, "block_n": 64, "num_stages": 3,
        "pv_flush": pv_flush, "overlap": overlap,
    }  # fmt: skip
    made, twin = both(kernel, q, k, v, causal=causal, fields=fields)
    check(made, twin, oracle(q, k, v, is_causal=causal), small_lse=6e-3)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block_n", [64, 128])
def test_an_early_start_changes_nothing(kernel, causal, block_n):
    q, k, v = inputs((2, 4, 2, 700, 1100, 64))
    late, early = (
        both(kernel, q, k, v, causal=causal, fields={"overlap": overlap, "block_n": block_n})[0]
        for overlap in (False, True)
    )
    assert relative_l1(late[0], early[0]) < 1e-4
    assert torch.allclose(late[1], early[1], atol=1e-4)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("block_m", [128, 192])
@pytest.mark.parametrize("dim", [64, 128])
def test_programs_that_go_on_to_the_next_tile_change_no_bit(kernel, block_m, dim):
    """More tiles than an SM has programs for; the last round is not full."""
    q, k, v = inputs((3, 20, 4, 1300, 333, dim))
    tile = {"block_m": block_m, "num_warps": block_m // 16}
    shared, single = (
        both(kernel, q, k, v, fields={"persistent": persistent} | tile)[0]
        for persistent in (True, False)
    )
    assert torch.equal(shared[0], single[0])
    assert torch.equal(shared[1], single[1])


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rise", [0.3, 0.9, 1.5, 12.0])
@pytest.mark.parametrize("from_end", [False, True], ids=["towards the end", "towards the start"])
def test_maxima_that_rise_from_block_to_block(kernel, dim, rise, from_end):
    """By less and by more than the headroom, in octaves a block; blocks are walked from the end."""
    q, k, v = inputs((1, 4, 4, 300, 1536, dim))
    q = torch.ones_like(q) + 0.05 * q
    step = rise * math.log(2) * dim**0.5 / dim
    block = torch.arange(1536, device="cuda") // 128
    block = 11 - block if from_end else block
    k = 0.3 * torch.randn_like(k.float()) + (step * block)[None, None, :, None]
    k = k.to(q.dtype)
    made, twin = both(kernel, q, k, v)
    check(made, twin, oracle(q, k, v), small=1e-3, small_lse=2e-2)


@pytest.mark.parametrize("kernel", FP8_WEIGHTS)
def test_an_early_start_at_128_channels_with_half_blocks(kernel):
    q, k, v = inputs((1, 2, 2, 700, 1100, 128))
    fields = {"overlap": True, "block_n": 64}
    made, twin = both(kernel, q, k, v, fields=fields)
    check(made, twin, oracle(q, k, v))


@pytest.mark.parametrize("kernel", FP8_WEIGHTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_linear_weights_add_what_the_emulation_says(kernel, dim):
    q, k, v = inputs((1, 4, 4, 1024, 4096, dim))
    v = v - v.float().mean(2, keepdim=True).to(v.dtype)
    exact, _ = oracle(q, k, v)
    errors = {}
    for eighths in (0, 4, 6):
        made, twin = both(kernel, q, k, v, fields={"exp_linear": eighths})
        errors[eighths] = [relative_l1(out, exact) for out, _ in (made, twin)]
    for ours, twins in errors.values():
        assert 0.85 * twins <= ours <= 1.15 * twins
    assert errors[0][0] < errors[4][0] < 1.1 * errors[0][0]
    assert errors[4][0] < errors[6][0] < 1.2 * errors[0][0]


@pytest.mark.parametrize("kernel", FP8_WEIGHTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_values_that_drift_along_the_sequence(kernel, dim):
    """The tensor cores' accumulator truncates; what it holds must not grow for long."""
    keys = 16384
    q, k, noise = inputs((1, 4, 4, 512, keys, dim))
    sign = torch.where(torch.arange(keys, device="cuda") < keys // 2, 1.0, -1.0)
    v = (sign[:, None] + 0.1 * (noise.float() - 0.5)).to(torch.bfloat16)
    exact, _ = oracle(q, k, v)
    options = {"kernel": kernel, "out_dtype": torch.float32}

    def error(variant, **fields):
        config = config_of(kernel, variant, q, k, v, **fields)
        out = sage_plugin.attention(q, k, v, variant=variant, launch=config, **options)
        return (out - exact).abs().mean().item()

    two_level = error("portable", pv_flush=1)
    assert error("hopper", pv_flush=8) <= 2 * two_level + 1e-4
    assert error("hopper", pv_flush=1) <= 1.2 * two_level + 1e-4
    never = error("hopper", pv_flush=0)
    assert error("hopper", pv_flush=8) < never


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("place", [0, 31, 64, 127, 128, 300, 420, 448])
def test_what_is_not_finite_reaches_the_rows_that_see_it(kernel, value, which, causal, place):
    """In edge blocks and whole ones, among exact weights and linear ones."""
    tensors = list(inputs((2, 4, 2, 449, 449, 64)))
    clean = [t.clone() for t in tensors]
    tensors[which][1, 1, place, 5] = value
    config = config_of(kernel, "hopper", *tensors, causal=causal)
    options = {"kernel": kernel, "variant": "hopper", "launch": config, "is_causal": causal}
    out = sage_plugin.attention(*tensors, **options)
    fine = sage_plugin.attention(*clean, **options)
    sees = torch.zeros(2, 4, 449, dtype=torch.bool, device="cuda")
    if which == 0:
        sees[1, 1, place] = True
    else:
        sees[1, 2:, place if causal else 0 :] = True  # the two heads of key head 1
    bad = ~torch.isfinite(out).all(-1)
    assert torch.equal(bad, sees)
    # Scales and means of the head with it may differ, those of others may not.
    others = torch.ones_like(sees)
    others[1, 1 if which == 0 else slice(2, 4)] = False
    assert torch.equal(out[others], fine[others])
    left = ~sees & ~others
    if left.any():
        assert relative_l1(out[left], fine[left]) < 0.1


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nan_that_nobody_sees_is_part_of_nothing(kernel, causal):
    q, k, v = inputs((1, 2, 2, 300, 500, 64))
    mask = torch.ones(1, 1, 1, 500, dtype=torch.bool, device="cuda")
    mask[..., 250:320] = False
    options = {"kernel": kernel, "variant": "hopper", "attn_mask": mask, "is_causal": causal}
    expected = sage_plugin.attention(q, k, v, **options)
    for tensor in (k, v):
        tensor[:, :, 250:320] = math.nan
    out = sage_plugin.attention(q, k, v, **options)
    assert torch.isfinite(out).all()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_without_keys_are_zero(kernel, causal):
    q, k, v = inputs((2, 4, 2, 400, 260, 64))
    mask = torch.ones(2, 1, 1, 260, dtype=torch.bool, device="cuda")
    mask[0] = False
    made, twin = both(kernel, q, k, v, mask=mask, causal=causal)
    check(made, twin, oracle(q, k, v, mask=mask, is_causal=causal))
    out, lse = made
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    if causal:  # bottom-right: the first 140 rows see nothing
        assert (out[:, :, :140] == 0).all()
        assert (out[1, :, 140:].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strided_views_are_read_and_written_in_place(kernel, layout):
    batch, heads, seq, dim = 2, 3, 500, 80
    storage = torch.randn(batch, seq, 3, heads, dim + 16, device="cuda", dtype=torch.float16)
    before = storage.clone()
    q, k, v = (t[..., 8:-8] for t in storage.unbind(2))
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = {"kernel": kernel, "variant": "hopper", "layout": layout, "return_lse": True}
    expected, expected_lse = sage_plugin.attention(*(t.contiguous() for t in (q, k, v)), **options)
    out, lse = sage_plugin.attention(q, k, v, **options)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(storage, before)
    assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_grouped_heads_are_repeated_heads(kernel, dim, causal):
    q, k, v = inputs((2, 12, 3, 300, 420, dim))
    options = {"kernel": kernel, "variant": "hopper", "return_lse": True, "is_causal": causal}
    out, lse = sage_plugin.attention(q, k, v, **options)
    wide = [t.repeat_interleave(4, 1) for t in (k, v)]
    expected, expected_lse = sage_plugin.attention(q, *wide, **options)
    assert relative_l1(out, expected) < 2e-3
    assert torch.allclose(lse, expected_lse, atol=2e-3)


@pytest.mark.parametrize("kernel", HOPPER)
def test_many_heads_and_batches_keep_to_their_own(kernel):
    q, k, v = inputs((300, 24, 8, 70, 140, 64), torch.float16)
    options = {"kernel": kernel, "variant": "hopper", "return_lse": True}
    out, lse = sage_plugin.attention(q, k, v, **options)
    for item in (0, 1, 150, 299):
        one = [t[item : item + 1] for t in (q, k, v)]
        alone, alone_lse = sage_plugin.attention(*one, **options)
        assert relative_l1(out[item], alone[0]) < 2e-3
        assert torch.allclose(lse[item], alone_lse[0], atol=2e-3)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("dim", [64, 128])
def test_offsets_beyond_32_bits(kernel, dim):
    """The output and the operands pass 2^31 elements; the last head is right."""
    heads = 2**31 // (2048 * dim) + 3
    q = torch.randn(1, 1, 2048, dim, device="cuda", dtype=torch.float16).expand(1, heads, -1, -1)
    k, v = (torch.randn(1, 1, 256, dim, device="cuda", dtype=torch.float16) for _ in range(2))
    config = config_of(kernel, "hopper", q, k, v)
    options = {"kernel": kernel, "variant": "hopper", "launch": config}
    out = sage_plugin.attention(q, k, v, **options)
    expected = sage_plugin.attention(q[:, :1], k, v, **options)
    for head in (0, heads // 2, heads - 1):
        assert relative_l1(out[:, head : head + 1], expected) < 2e-3


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_two_launches_are_equal_to_the_bit(kernel, dim, causal):
    q, k, v = inputs((2, 8, 4, 1500, 2500, dim))
    built = implementation(kernel, "hopper", torch.float8_e4m3fn)
    config = config_of(kernel, "hopper", q, k, v, causal=causal)
    problem = AttentionParams(dim**-0.5, causal, "bhsd")
    operands = built.prepare(q, k, v, problem=problem, launch=config)
    first, first_lse = built.launch(operands, return_lse=True)
    for _ in range(20):
        poison(q)
        again, again_lse = built.launch(operands, return_lse=True)
        assert torch.equal(again, first)
        assert torch.equal(again_lse, first_lse)
    without, none = built.launch(operands)
    assert none is None
    assert torch.equal(without, first)


EXTREMES = {
    "tiny q": (1e-6, 1.0, 1.0),
    "tiny k": (1.0, 1e-6, 1.0),
    "tiny v": (1.0, 1.0, 1e-6),
    "tiny": (1e-4, 1e-4, 1e-4),
    "zero q": (0.0, 1.0, 1.0),
    "zero k": (1.0, 0.0, 1.0),
    "zero v": (1.0, 1.0, 0.0),
    "sharp": (8.0, 8.0, 1.0),
    "one key of each row": (40.0, 40.0, 1.0),
    "huge q": (300.0, 10.0, 1.0),
    "huge q and k": (300.0, 300.0, 1.0),
    "huge v": (1.0, 1.0, 3e4),
}


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("factors", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_huge_and_tiny_inputs(kernel, factors, dim, causal):
    """INT8 scores go by floats near 3 * 2^22 times a scale, which leaves large ones few digits."""
    q, k, v = inputs((1, 4, 2, 500, 900, dim), torch.float32)
    k = k - 2.0
    q, k, v = ((t * f).to(torch.bfloat16) for t, f in zip((q, k, v), factors, strict=True))
    (out, lse), (twin, twin_lse) = both(kernel, q, k, v, causal=causal)
    exact, exact_lse = oracle(q, k, v, is_causal=causal)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()
    size = exact.abs().mean().item() + 1e-30
    error, twins = ((x - exact).abs().mean().item() / size for x in (out, twin))
    assert error <= 1.2 * twins + 0.01
    scale = exact_lse.abs().max().item()
    limit = 1.5 * (twin_lse - exact_lse).abs().max().item() + 2e-3 + 1e-5 * scale
    assert (lse - exact_lse).abs().max().item() <= limit


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("smooth", [False, True])
def test_scores_that_are_all_negative(kernel, smooth):
    """Maxima start at zero where K is smoothed, which is right only as scores then sum to zero."""
    q, k, v = inputs((1, 2, 2, 300, 640, 64), torch.float32)
    q = q.abs() + 0.5
    k = -(k - 2.0).abs() - 1.0
    q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    made, twin = both(kernel, q, k, v, fields={"smooth_k": smooth})
    check(made, twin, oracle(q, k, v))


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("keys", [1, 64, 128, 256])
def test_equal_keys_average_the_values(kernel, keys):
    """All scores are zero after smoothing; the mean of V is what is left."""
    q, k, v = inputs((1, 2, 2, 200, keys, 64))
    k = k[:, :, :1].expand_as(k).contiguous()
    out = sage_plugin.attention(q, k, v, kernel=kernel, variant="hopper", out_dtype=torch.float32)
    expected = v.float().mean(2, keepdim=True).expand_as(out)
    assert relative_l1(out, expected) < 0.01


@pytest.mark.parametrize("kernel", HOPPER)
def test_the_default_of_a_call_is_the_gluon_kernel(kernel):
    q, k, v = inputs((1, 2, 2, 300, 400, 128))
    prepared = sage_plugin.prepare(q, k, v, kernel=kernel)
    assert prepared.decision.label == f"{kernel}:hopper"
    out = sage_plugin.launch(prepared)
    assert torch.equal(out, sage_plugin.attention(q, k, v, kernel=kernel, variant="hopper"))
    assert not torch.equal(out, sage_plugin.attention(q, k, v, kernel=kernel, variant="portable"))
