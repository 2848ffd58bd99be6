"""Masks, windows, caps, sinks and packed sequences in the portable kernels, in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Packed
from tests.kernels.calls import EMULATED, Shape, draw, launch, relative_l1
from tests.kernels.problems import mask_of
from tests.kernels.written_out import seen_by
from tests.kernels.written_out import written_out as naive

pytestmark = pytest.mark.usefixtures("interpreted")

SHAPE = Shape(2, 4, 2, 40, 75, 64)
SMALL = Shape(2, 2, 1, 40, 75, 64)
"""Half of the programs, for what does not ask which heads share a head of keys."""
SINKS = torch.tensor([-2.0, 0.0, 1.0, 3.0])
PARTS = {
    "padding": {"mask": "key_bool"},
    "padding of heads": {"mask": "head_bool"},
    "key bias": {"mask": "key_float"},
    "dense": {"mask": "bool"},
    "bias": {"mask": "float"},
    "dead rows": {"mask": "dead_rows"},
    "causal and padding": {"mask": "key_bool", "causal": True},
    "window": {"window": (10, 3)},
    "causal window": {"window": (20, -1), "causal": True},
    "cap": {"softcap": 5.0},
    "cap, causal and bias": {"softcap": 3.0, "causal": True, "mask": "float"},
    "sinks": {"sinks": SINKS},
    "sinks and dead rows": {"sinks": SINKS, "mask": "dead_rows"},
    "all of it": {
        "sinks": SINKS, "mask": "key_float", "causal": True, "window": (30, -1), "softcap": 8.0
    },
}  # fmt: skip


def problem_of(parts, shape=SHAPE):
    fields = {"causal": False, "layout": "bhsd", "scale": shape.dim**-0.5} | parts
    if "sinks" in fields:
        fields = fields | {"sinks": fields["sinks"][: shape.heads_q]}
    return AttentionParams(**fields | {"mask": mask_of(parts.get("mask", "none"), shape)})


def run(kernel, variant, tensors, problem, **fields):
    if kernel == "fav2":
        fields = {"smooth_k": False, "smooth_v": False} | fields
    built = implementation(kernel, variant)
    operands = built.prepare(*tensors, problem=problem, launch=launch(32, 32, **fields))
    return built.launch(operands, out_dtype=torch.float32, return_lse=True)


def assert_same(kernel, tensors, problem, **fields):
    """The portable variant gives the twin's output and LSE."""
    out, lse = run(kernel, "portable", tensors, problem, **fields)
    twin, twin_lse = run(kernel, "emulation", tensors, problem, **fields)
    assert relative_l1(out, twin) < 5e-4
    dead = torch.isinf(twin_lse)
    assert torch.equal(torch.isinf(lse), dead)
    assert (lse - twin_lse)[~dead].abs().max() < 0.02
    return out, lse


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_every_part_of_a_problem_is_the_twins(kernel, parts):
    tensors = draw(SMALL, torch.float32)
    problem = problem_of(parts, SMALL)
    out, lse = assert_same(kernel, tensors, problem)
    exact, exact_lse = naive(*tensors, problem)
    assert relative_l1(out, exact) < {"fav2": 2e-3, "sage": 0.02}.get(kernel, 0.09)
    dead = torch.isinf(exact_lse)
    assert (lse - exact_lse)[~dead].abs().max() < 0.5
    nobody = ~seen_by(problem, 2, 2, 40, 75).any(-1)
    assert (out[nobody] == 0).all()
    assert nobody.any() == ("dead_rows" in parts.values())


@pytest.mark.parametrize("kernel", ["sage", "fav3_sage", "fav3_fp8"])
@pytest.mark.parametrize(
    "fields",
    [{"hadamard": 32}, {"hadamard": 64, "q_granule": 16}, {"smooth_k": False}, {"smooth_v": False},
     {"q_granule": 128, "smooth_k": False}, {"loads": "descriptor", "hadamard": 16}],
    ids=str,
)  # fmt: skip
def test_every_quantization_option_is_the_twins(kernel, fields):
    problem = problem_of(PARTS["all of it"])
    assert_same(kernel, draw(SHAPE, torch.float16), problem, **fields)


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_report_28_packed_sequences_are_calls_of_their_own(kernel, loads):
    if kernel == "fav2" and loads == "descriptor":
        pytest.skip("fav2 reads its inputs in place")
    cu_q = torch.tensor([0, 5, 70, 71, 71, 104], dtype=torch.int32)
    cu_k = torch.tensor([0, 7, 67, 68, 70, 108], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, s, h, 64, generator=generator) for s, h in ((104, 4), (108, 2), (108, 2))
    )
    k += cu_k.diff().float().repeat_interleave(cu_k.diff())[None, :, None, None] / 20
    parts = {"causal": True, "layout": "bshd", "scale": 0.125, "sinks": SINKS, "window": (25, -1)}
    packed = AttentionParams(**parts, packed=Packed(cu_q, cu_k, 65, 60))
    out, lse = run(kernel, "portable", (q, k, v), packed, loads=loads)
    assert lse.shape == (1, 4, 104)
    for i in range(5):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        if rows.start == rows.stop:
            continue
        alone = (q[:, rows], k[:, keys], v[:, keys])
        expected, expected_lse = run(
            kernel, "portable", alone, AttentionParams(**parts), loads=loads
        )
        assert torch.equal(out[:, rows], expected)
        assert torch.equal(lse[:, :, rows], expected_lse)


@pytest.mark.parametrize("kernel", EMULATED)
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
@pytest.mark.parametrize("parts", ["padding", "dense", "causal and padding", "window"])
def test_nan_shows_in_the_rows_that_see_it_and_in_no_other(kernel, which, parts):
    problem = problem_of(PARTS[parts], SMALL)
    tensors = list(draw(SMALL, torch.float32))
    tensors[which] = tensors[which].clone()
    tensors[which][1, :, 62, 3] = math.nan
    out, _ = run(kernel, "portable", tensors, problem)
    sees = seen_by(problem, 2, 2, 40, 75)[..., 62].clone()
    sees[0] = False
    assert torch.equal(out.isnan().any(-1), sees)
    tensors[which] = tensors[which].nan_to_num(0.0)
    clean, _ = naive(*tensors, problem)
    limit = {"fav2": 2e-3, "sage": 0.02}.get(kernel, 0.09)
    assert relative_l1(out[~sees], clean[~sees]) < limit


@pytest.mark.parametrize("kernel", ["sage", "fav3_sage"])
def test_keys_that_nobody_sees_are_part_of_no_scale(kernel):
    tensors = draw(SHAPE, torch.float32)
    problem = problem_of(PARTS["padding"])
    hidden = ~problem.mask.expand(2, 2, 1, 75)[:, :, 0]
    expected, _ = run(kernel, "portable", tensors, problem)
    q, k, v = (t.clone() for t in tensors)
    k[hidden], v[hidden] = 3e30, -1e30
    out, _ = run(kernel, "portable", (q, k, v), problem)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", EMULATED)
def test_the_largest_values_of_a_type_stay_finite(kernel):
    q, k, _ = draw(SHAPE, torch.float32)
    # fav2 sums before it divides, as SDPA does
    v = torch.full_like(k, 1e36 if kernel == "fav2" else 3.3e38)
    v[:, :, ::2] *= 0.5
    out, _ = run(kernel, "portable", (q, k, v), problem_of({}))
    exact, _ = naive(q, k, v.double(), problem_of({}))
    assert torch.isfinite(out).all()
    assert relative_l1(out, exact) < 0.05
