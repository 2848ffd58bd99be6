"""What the pre-pass makes of Q, K and V on a GPU, held against its twin in torch number by number.

Assemblers have packed and unpacked FP8 numbers wrong for some shapes of a tile and not for others,
so every head dim, block and type has its build looked at.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize import emulation
from sage_plugin.kernels.quantize.operands import QuantizedOperands
from sage_plugin.kernels.support import kernels_of
from tests.gpu.pairs import pairwise
from tests.gpu.variants import poison
from tests.kernels.calls import QUANTIZED, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DIMS = (1, 3, 8, 16, 40, 64, 80, 96, 128, 160, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMS = {
    "plain": {},
    "rough": {"smooth_k": False, "smooth_v": False},
    "rotated": {"hadamard": 32, "q_granule": 16},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs, and what was made of them on the GPU."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    made: QuantizedOperands

    @property
    def options(self) -> dict:
        return {"recipe": self.made.recipe}


def case(kernel, seq_q, seq_k, dim, dtype, **fields) -> Case:
    """A grouped call, K with a bias of each channel and V with a mean, in poisoned memory."""
    if kernel not in kernels_of(dispatch.facts_of("cuda", 0)):
        pytest.skip(f"{kernel} does not run here")
    generator = torch.Generator("cuda").manual_seed(dim)

    def draw(heads, seq):
        return torch.randn(1, heads, seq, dim, generator=generator, device="cuda")

    k = draw(2, seq_k) + 20.0 * torch.linspace(-1, 1, dim, device="cuda")
    q, k, v = (t.to(dtype) for t in (draw(4, seq_q), k, draw(2, seq_k) + 0.5))
    built = implementation(kernel, "portable", torch.float8_e4m3fn)
    poison(q)
    problem = AttentionParams(dim**-0.5, False, "bhsd")
    made = built.prepare(q, k, v, problem=problem, launch=launch(64, **fields))
    return Case(q, k, v, made)


def near(found, expected, what):
    """Scales and means agree but for the order of sums."""
    assert torch.allclose(found, expected, rtol=2e-6, atol=1e-6), what


def same_numbers(found, expected, what):
    """8-bit values agree, but for the few that a last bit of their scale puts across a tie."""
    found, expected = found.float(), expected.float()
    assert torch.isfinite(found).all(), what
    apart = found != expected
    assert apart.float().mean() < 5e-3, what
    largest = (found - expected).abs()[apart].max().item() if apart.any() else 0.0
    assert largest <= max(1.0, 0.13 * expected.abs().max().item()), what


def check_queries(one: Case) -> None:
    made, (_, heads, seq, dim) = one.made, one.q.shape
    config = made.launch_config
    twin = emulation.quantize_q(
        one.q, scale=dim**-0.5, hadamard=config.hadamard, granule=config.q_granule, **one.options
    )
    same_numbers(made.q8[:, :seq, :dim], twin.values.reshape(heads, seq, dim), "Q")
    assert (made.q8[:, seq:].float() == 0).all()
    assert (made.q8[..., dim:].float() == 0).all()
    near(made.q_scale[:, :seq], twin.scale.reshape(heads, seq), "scale of Q")


def check_keys(one: Case) -> None:
    made, (_, heads, seq, dim) = one.made, one.k.shape
    config = made.launch_config
    twin = emulation.quantize_k(
        one.k, block_n=config.block_n, smooth=config.smooth_k, hadamard=config.hadamard,
        **one.options,
    )  # fmt: skip
    same_numbers(made.k8[..., :dim], twin.values.reshape(heads, -1, dim), "K")
    assert (made.k8[:, seq:].float() == 0).all()
    assert (made.k8[..., dim:].float() == 0).all()
    near(made.k_scale, twin.scale.reshape(heads, -1), "scale of K")
    assert torch.equal(made.k_scale, made.k_scale_finite)
    if config.smooth_k:
        shift = (
            one.q.float() @ twin.mean.repeat_interleave(2, 1)[..., None] * (dim**-0.5 * 1.442695)
        )
        assert torch.allclose(
            made.shift[:, : one.q.shape[2]], shift[0, ..., 0], rtol=1e-4, atol=1e-3
        )


def check_values(one: Case) -> None:
    made, (_, heads, seq, dim) = one.made, one.v.shape
    config = made.launch_config
    twin = emulation.quantize_v(
        one.v, block_n=config.block_n, smooth=config.smooth_v, **one.options
    )
    values = made.v8
    if made.recipe.pv == "fp8":  # a row a channel, keys permuted inside 16
        stored = values.float().view(heads, -1, values.shape[2] // 16, 4, 2, 2)
        values = stored.transpose(3, 4).reshape(values.shape).transpose(1, 2)
        owed = made.v_mean - made.v_residual.float() * made.v_unit
        lost = 0.02 * twin.scale.reshape(heads, dim)  # of a unit of V8, a key
        assert ((owed[:, :dim] - twin.owed.reshape(heads, dim)).abs() <= lost).all()
    same_numbers(values[..., :dim], twin.values.reshape(heads, -1, dim), "V")
    assert (values[:, seq:].float() == 0).all()
    near(made.v_scale[:, :dim], twin.scale.reshape(heads, dim), "scale of V")
    near(made.v_mean[:, :dim], twin.mean.reshape(heads, dim), "mean of V")


CHECKS = (check_queries, check_keys, check_values)


@pairwise(kernel=QUANTIZED, dim=DIMS, dtype=DTYPES, block_n=[32, 64, 128])
def test_every_head_dim_type_and_block(kernel, dim, dtype, block_n):
    one = case(kernel, 300, 500, dim, dtype, block_n=block_n)
    for check in CHECKS:
        check(one)


@pairwise(kernel=QUANTIZED, dim=[64, 128], fields=FORMS, dtype=[torch.bfloat16, torch.float32])
def test_calls_of_two_launches(kernel, dim, fields, dtype):
    """Long calls: whole blocks, groups of parts, the sums of parts in V's place."""
    one = case(kernel, 3000, 40_000 * 64 // dim, dim, dtype, block_n=128, **fields)
    for check in CHECKS:
        check(one)
