"""The pre-pass in the interpreter: every order of its programs, several parts and groups a head."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.calls import QUANTIZED, Shape, draw, launch
from tests.kernels.problems import packed_of

plan = pytest.importorskip("sage_plugin.kernels.quantize.schedule")
portable = pytest.importorskip("sage_plugin.kernels.quantize.triton.launch")
prepass_kernel = pytest.importorskip("sage_plugin.kernels.quantize.triton.prepass_kernel")
tl = pytest.importorskip("triton.language")

in_small_parts = pytest.mark.usefixtures("interpreted", "small_parts", "no_waits", "nan_scratch")

LEADS = {"last": 0, "next": 40, "far": 200, "first": 10**6}
"""Warps ahead of a block: the parts of no, one, some or all other heads come before it."""


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 16 keys at 64 channels, groups of two."""
    monkeypatch.setattr(portable, "LOADS_AT_ONCE", 1)
    monkeypatch.setattr(plan, "PART_VALUES", 1024)
    monkeypatch.setattr(plan, "LARGEST_GROUP", 3)
    monkeypatch.setattr(plan, "GROUP_PARTS", 2)
    plan.plan_of.cache_clear()
    yield
    plan.plan_of.cache_clear()


@pytest.fixture
def no_waits(monkeypatch):
    """A wait that would not end here, where programs run one after another, is a failure."""

    def ready(counter, arrivals):
        assert int(tl.atomic_add(counter, 0).handle.data.item()) == arrivals

    monkeypatch.setattr(prepass_kernel, "await_head", ready)


def order(monkeypatch, warps_ahead):
    monkeypatch.setattr(plan, "WARPS_AHEAD", warps_ahead)
    plan.plan_of.cache_clear()


def prepared(kernel, q, k, v, problem, **fields):
    """The tensors among the operands, whole."""
    built = implementation(kernel, "portable")
    made = built.prepare(q, k, v, problem=problem, launch=launch(**fields))
    found = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    tensors = {n: t for n, t in found.items() if isinstance(t, torch.Tensor)}
    if kernel == "sage":
        del tensors["v_residual"], tensors["v_unit"], tensors["v_drifts"]
    return {n: t.view(torch.uint8) if t.element_size() == 1 else t for n, t in tensors.items()}


def assert_same(found, expected):
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@in_small_parts
@pytest.mark.parametrize("kernel", QUANTIZED)
@pytest.mark.parametrize("shape", [Shape(2, 2, 1, 70, 90, 64), Shape(1, 3, 3, 9, 33, 40)], ids=str)
def test_the_order_of_programs_changes_nothing(kernel, shape, monkeypatch):
    q, k, v = draw(shape, torch.bfloat16)
    problem = AttentionParams(0.125, False, "bhsd")
    found = []
    for warps_ahead in LEADS.values():
        order(monkeypatch, warps_ahead)
        found.append(prepared(kernel, q, k, v, problem, block_n=32))
    for other in found[1:]:
        assert_same(other, found[0])
    keys = k.float().mean(2)
    shift = (q.float() * keys.repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None]).sum(-1)
    made = found[0]["shift"].view(shape.batch, shape.heads_q, -1)[:, :, : shape.seq_q]
    assert torch.allclose(made, shift * 0.125 * 1.4426950, atol=1e-3, rtol=1e-4)
    means = found[0]["v_mean"].view(shape.batch, shape.heads_k, -1)[..., : shape.dim]
    assert torch.allclose(means, v.float().mean(2), atol=1e-5)


@in_small_parts
@pytest.mark.parametrize(
    ("kernel", "warps_ahead"),
    [("sage", LEADS["last"]), ("fav3_sage", LEADS["next"]), ("fav3_fp8", LEADS["far"]),
     ("fav3_sage", LEADS["first"])],
)  # fmt: skip
def test_packed_sequences_have_the_statistics_of_each_alone(kernel, warps_ahead, monkeypatch):
    order(monkeypatch, warps_ahead)
    ends_q, ends_k = [0, 5, 5, 70, 75], [0, 70, 86, 86, 130]
    shape = Shape(1, 4, 2, ends_q[-1], ends_k[-1], 64)
    q, k, v = draw(shape, torch.float16, layout="bshd")
    problem = AttentionParams(0.125, True, "bshd", packed=packed_of(ends_q, ends_k))
    made = prepared(kernel, q, k, v, problem)
    for i in range(4):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        at = slice(2 * i, 2 * i + 2)
        if keys.start == keys.stop:
            assert (made["v_mean"][at] == 0).all()
            continue
        part = q[:, rows] if rows.start < rows.stop else q[:, :1]
        alone = prepared(kernel, part, k[:, keys], v[:, keys], AttentionParams(0.125, True, "bshd"))
        for name in ("v_mean", "v_scale", "v_residual"):
            if name in alone:
                assert torch.equal(made[name][at], alone[name]), name
        blocks = alone["k_scale"].shape[1]
        first = ends_k[i] // 32 + i
        assert torch.equal(made["k_scale"][:, first : first + blocks], alone["k_scale"])
        row, count = (ends_q[i] // 64 + i) * 64, rows.stop - rows.start
        assert torch.equal(made["shift"][:, row : row + count], alone["shift"][:, :count])


@in_small_parts
@pytest.mark.parametrize("kernel", QUANTIZED)
@pytest.mark.parametrize("smooth", [False, True])
def test_a_call_leaves_nothing_to_the_next(kernel, smooth):
    q, k, v = draw(Shape(1, 2, 2, 40, 90, 64), torch.float16)
    problem = AttentionParams(0.125, False, "bhsd")
    first = prepared(kernel, q, k, v, problem, smooth_k=smooth)
    prepared(kernel, q, 2 * k[:, :, :30], v[:, :, :30] - 3, problem, smooth_k=smooth)
    again = prepared(kernel, q, k, v, problem, smooth_k=smooth)
    assert ("shift" in first) is smooth
    assert_same(again, first)


@in_small_parts
@pytest.mark.parametrize(
    ("kernel", "value", "which"),
    [(kernel, value, "kv"[(at + turn) % 2]) for at, kernel in enumerate(QUANTIZED)
     for turn, value in enumerate((torch.nan, torch.inf, 3e38))],
)  # fmt: skip
def test_careful_and_fast_blocks_agree_beside_a_bad_key(kernel, value, which):
    """A head with one bad key leaves the fast path, in its parts and in its blocks."""
    shape = Shape(1, 2, 2, 20, 90, 64)
    q, k, v = draw(shape, torch.bfloat16)
    problem = AttentionParams(0.125, False, "bhsd")
    clean = prepared(kernel, q, k, v, problem)
    (k if which == "k" else v)[:, 1, 37, 5] = value
    made = prepared(kernel, q, k, v, problem)
    for name, tensor in clean.items():
        assert torch.equal(made[name][0], tensor[0]), name
    finite = value == 3e38
    assert torch.isfinite(made["k_scale"][1]).tolist() == [True, finite, True]
    assert torch.isfinite(made["k_scale_finite"]).all()
    assert torch.isfinite(made["v_scale"]).all()
    assert made["key_term"][1].isnan().nonzero().flatten().tolist() == ([] if finite else [37])
    if not finite:
        assert (made["k8"][1, 37] == 0).all()


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("seq_q", [1, 500, 20_000])
@pytest.mark.parametrize("seq_k", [1, 500, 200_000])
def test_parts_are_far_enough_ahead_of_their_blocks(ratio, seq_q, seq_k):
    for heads in (1, 2, 60):
        made = plan.plan_of(heads, ratio, seq_q, seq_k, 128, (128, 128, 1))
        per_head = made.parts + ratio * made.q_blocks + 2 * made.k_blocks
        distance = made.ahead + made.lead * per_head
        if len(made.launches) == 1:
            assert made.lead == heads or distance >= plan.WARPS_AHEAD // made.warps
        assert [phase for phase, *_ in made.launches] in ([0], [1, 2])
        spare = made.lead * made.parts if len(made.launches) == 1 else 0
        assert sum(count for _, count, _ in made.launches) == heads * per_head + spare
        assert made.parts * made.part_keys >= seq_k
        assert made.q_blocks * made.q_tile >= seq_q
        assert made.groups * made.group_parts >= made.parts


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("granule", [1, 64, 128])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_queries_follow_the_parts_in_the_first_of_two_launches(ratio, granule, width):
    made = plan.plan_of(24, ratio, 16_452, 16_452, width, (192, 128, granule))
    (phase, programs, warps), (then, others, _) = made.launches
    assert (phase, then) == (1, 2)
    assert programs == 24 * (made.parts + ratio * made.q_blocks)
    assert others == 24 * 2 * made.k_blocks
    assert made.q_tile % granule == 0
    assert made.q_tile * width == plan.WARP_VALUES * warps
    assert made.q_blocks * made.q_tile >= 16_452 > (made.q_blocks - 2) * made.q_tile


@in_small_parts
@pytest.mark.parametrize(("trend", "expected"), [(0.0, [0, 0]), (0.5, [0, 1])])
def test_a_trend_of_one_channel_of_one_head_is_seen(trend, expected, monkeypatch):
    """Sixteen keys a part and thirty parts, which are added up in one go."""
    monkeypatch.setattr(plan, "LARGEST_GROUP", 64)
    plan.plan_of.cache_clear()
    q, k, v = draw(Shape(1, 2, 2, 8, 480, 64))
    v[0, 1, :240, 5] += trend
    v[0, 1, 240:, 5] -= trend
    ops = prepared("fav3_sage", q, k, v, AttentionParams(0.1, False, "bhsd"))
    assert ops["v_drifts"].tolist() == expected


@in_small_parts
def test_a_trend_is_taken_for_granted_where_parts_are_few():
    q, k, v = draw(Shape(1, 2, 1, 8, 160, 64))
    ops = prepared("fav3_fp8", q, k, v, AttentionParams(0.1, False, "bhsd"))
    assert ops["v_drifts"].tolist() == [1]


@in_small_parts
def test_a_head_with_a_step_alone_drifts_where_records_are_groups():
    q, k, v = draw(Shape(1, 1, 1, 8, 1600, 64))
    kept = AttentionParams(0.1, False, "bhsd")
    assert prepared("fav3_sage", q, k, v, kept)["v_drifts"].tolist() == [0]
    v[:, :, 800:] += 1.0
    assert prepared("fav3_sage", q, k, v, kept)["v_drifts"].tolist() == [1]


@in_small_parts
@pytest.mark.parametrize(
    ("kernel", "part_values", "seq_k"),
    [
        pytest.param("sage", 1024, 90, id="records apart, a last block with a rest"),
        pytest.param("fav3_sage", 4096, 90, id="records in V, a last block with a rest"),
        pytest.param("fav3_fp8", 4096, 96, id="records in V, whole blocks"),
        pytest.param("fav3_sage", 1024, 96, id="records apart, whole blocks"),
    ],
)
def test_two_launches_make_what_one_makes(kernel, part_values, seq_k, monkeypatch):
    monkeypatch.setattr(plan, "PART_VALUES", part_values)
    plan.plan_of.cache_clear()
    q, k, v = draw(Shape(2, 4, 2, 70, seq_k, 64))
    problem = AttentionParams(0.1, False, "bhsd")
    one = prepared(kernel, q, k, v, problem)
    monkeypatch.setattr(plan, "ONE_LAUNCH_VALUES", 0)
    plan.plan_of.cache_clear()
    assert_same(prepared(kernel, q, k, v, problem), one)


@in_small_parts
@pytest.mark.filterwarnings("error:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("shape", [Shape(1, 2, 2, 0, 90, 64), Shape(1, 2, 2, 70, 0, 64)], ids=str)
def test_two_launches_of_a_call_without_queries_or_keys(shape, monkeypatch):
    q, k, v = draw(shape)
    problem = AttentionParams(0.1, False, "bhsd")
    one = prepared("fav3_sage", q, k, v, problem)
    in_launches(monkeypatch, 2)
    two = prepared("fav3_sage", q, k, v, problem)
    for name in ("q8", "q_scale") if shape.seq_q else ("k8", "v8", "k_scale", "v_mean"):
        assert torch.equal(two[name], one[name]), name


def in_launches(monkeypatch, count):
    """All of the pre-pass in one launch, or in two."""
    monkeypatch.setattr(plan, "ONE_LAUNCH_VALUES", 0 if count == 2 else 1 << 22)
    plan.plan_of.cache_clear()


def counted(monkeypatch, name):
    """The arguments of each call of a function of the kernel from here on."""
    calls, stock = [], getattr(prepass_kernel, name)

    def noted(*arguments):
        calls.append(arguments)
        stock(*arguments)

    monkeypatch.setattr(prepass_kernel, name, noted)
    return calls


@in_small_parts
@pytest.mark.parametrize("launches", [1, 2])
def test_each_block_of_queries_waits_for_its_head(launches, monkeypatch):
    in_launches(monkeypatch, launches)
    waited = counted(monkeypatch, "await_head")
    shape = Shape(2, 4, 2, 300, 90, 64)
    prepared("fav3_sage", *draw(shape), AttentionParams(0.1, False, "bhsd"))
    config = launch()
    made = plan.plan_of(4, 2, 300, 90, 64, (config.block_m, config.block_n, config.q_granule))
    # The last block is not whole, and the program of its values has nothing to do.
    blocks = made.q_blocks * 2 + (2 * made.k_blocks - 1 if launches == 1 else 0)
    assert len(waited) == 4 * blocks


@in_small_parts
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("kernel", QUANTIZED)
def test_queries_wait_for_nothing_where_nobody_needs_true_scores(launches, kernel, monkeypatch):
    in_launches(monkeypatch, launches)
    q, k, v = draw(Shape(2, 4, 2, 300, 90, 64))
    every = prepared(kernel, q, k, v, AttentionParams(0.1, False, "bhsd"))
    waited = counted(monkeypatch, "await_head")
    made = prepared(kernel, q, k, v, AttentionParams(0.1, False, "bhsd", lse=False))
    assert len(waited) == (0 if launches == 2 else 4 * 5)  # two whole blocks of 32 keys, a part
    assert {*every} - {*made} == {"shift"}
    for name in ("q8", "q_scale", "k8", "k_scale", "v8", "v_scale", "v_mean", "key_term"):
        assert torch.equal(made[name], every[name]), name


@pytest.mark.parametrize("cap", [{"softcap": 3.0}, {"sinks": torch.zeros(4)}], ids=str)
def test_caps_and_sinks_need_true_scores_without_the_lse(cap):
    q, k, v = draw(Shape(1, 4, 2, 30, 90, 64))
    problem = AttentionParams(0.1, False, "bhsd", lse=False, **cap)
    assert "shift" in prepared("sage", q, k, v, problem)


@pytest.mark.parametrize(
    ("heads", "seq_k", "parts"),
    [
        (24, 16_452, 33),  # of 512 keys: twice as many would show no trend
        (5, 75_600, 74),  # of 1,024, the largest
        (3, 118_808, 117),
        (4, 29_760, 117),  # of 256: half as many programs would leave a GPU idle
        (80, 131_072, 128),
        (4, 2048, 8),
    ],
)
def test_parts_are_large_where_queries_do_not_wait(heads, seq_k, parts):
    made = plan.plan_of(heads, 1, seq_k, seq_k, 128, (192, 128, 1), waits=False)
    assert made.parts == parts
    assert made.parts * made.part_keys >= seq_k > (made.parts - 1) * made.part_keys
    assert plan.plan_of(heads, 1, seq_k, seq_k, 128, (192, 128, 1)).part_keys == 256


@in_small_parts
@pytest.mark.parametrize("keys", [16, 17, 31, 90])
@pytest.mark.parametrize("bad", [False, True])
def test_the_last_part_of_a_head_counts_in_full(keys, bad, monkeypatch):
    """Tiles as far as they go, the rest row by row; parts of 64 keys, tiles of 16."""
    monkeypatch.setattr(plan, "PART_VALUES", 4096)
    plan.plan_of.cache_clear()
    q, k, v = draw(Shape(1, 2, 2, 8, keys, 64))
    if bad:
        v[0, 0, keys - 1, 3] = math.inf
    made = prepared("fav3_sage", q, k, v, AttentionParams(0.1, False, "bhsd"))
    right = v[0]
    mean = right.nan_to_num(0.0, 0.0, 0.0).sum(1) / keys
    torch.testing.assert_close(made["v_mean"][1], mean[1], rtol=1e-5, atol=1e-6)
    rest = [c for c in range(64) if c != 3]
    torch.testing.assert_close(made["v_mean"][0, rest], mean[0, rest], rtol=1e-5, atol=1e-6)
    amax = (right[1] - mean[1]).abs().amax(0)
    torch.testing.assert_close(made["v_scale"][1] * 448.0, amax, rtol=1e-5, atol=1e-6)


@in_small_parts
@pytest.mark.parametrize("launches", [1, 2])
def test_finite_blocks_go_the_fast_way(launches, monkeypatch):
    in_launches(monkeypatch, launches)
    slow = counted(monkeypatch, "store_block")
    q, k, v = draw(Shape(1, 2, 2, 70, 256, 64))
    prepared("fav3_sage", q, k, v, AttentionParams(0.1, False, "bhsd"))
    assert slow == []
    k[0, 1, 200, 3] = math.inf
    prepared("fav3_sage", q, k, v, AttentionParams(0.1, False, "bhsd"))
    assert len(slow) > 0
