"""Programs of the Gluon kernel that share the last tiles of a call by key blocks, on an H100."""

from __future__ import annotations

import math

import pytest
import torch

import sage_plugin
from sage_plugin import device
from sage_plugin.kernels.attention.backends.hopper import scheduler
from sage_plugin.kernels.attention.oracle import oracle
from tests.gpu.pairs import pairwise
from tests.gpu.test_hopper import both, check, inputs, pytestmark  # noqa: F401
from tests.gpu.variants import config_of
from tests.kernels.calls import FP8_WEIGHTS, HOPPER, relative_l1

SHARED = {
    "few tiles": (1, 8, 2, 700, 4000),
    "one query": (2, 4, 4, 1, 9000),
    "a round and a bit": (3, 20, 4, 500, 2100),
}


@pairwise(kernel=HOPPER, shape=SHARED, mask=["none", "padding", "bias"], dim=[40, 64, 128])
def test_programs_share_the_last_tiles_by_keys(kernel, shape, mask, dim):
    """Rows of which all keys of some pieces are hidden; the same bits each time."""
    q, k, v = inputs((*shape, dim))
    batch, seq_k, given = shape[0], shape[4], None
    if mask == "padding":
        given = torch.ones(batch, 1, 1, seq_k, dtype=torch.bool, device="cuda")
        given[0, ..., 1200:] = False
    elif mask == "bias":
        generator = torch.Generator("cuda").manual_seed(1)
        given = 2 * torch.randn(batch, 1, 1, seq_k, device="cuda", generator=generator)
        given[..., 300:1000] = -math.inf
    config = config_of(kernel, "hopper", q, k, v, mask=given, persistent=True)
    rows = -(-shape[3] // config.block_m) * shape[0] * shape[1]
    processors = device.facts("cuda").sm_count
    assert scheduler.stream_k(rows, -(-seq_k // config.block_n), processors).cut > 0
    made, twin = both(kernel, q, k, v, mask=given, fields={"persistent": True})
    check(made, twin, oracle(q, k, v, mask=given), small=1e-3, small_lse=6e-3)
    again = both(kernel, q, k, v, mask=given, fields={"persistent": True})[0]
    assert torch.equal(made[0], again[0])
    assert torch.equal(made[1], again[1])
    single = both(kernel, q, k, v, mask=given, fields={"persistent": False})[0]
    # A piece has maxima of its own, by which FP8 weights round another way.
    far = 1e-2 if kernel in FP8_WEIGHTS else 2e-3
    assert relative_l1(made[0], single[0]) < far
    assert torch.allclose(made[1], single[1], atol=2 * far)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("place", [0, 1500, 3999])
def test_a_key_that_is_not_finite_reaches_all_rows_from_one_piece(kernel, value, place):
    q, k, v = inputs((1, 8, 2, 700, 4000, 64))
    k[0, 1, place, 3] = value
    config = config_of(kernel, "hopper", q, k, v, persistent=True)
    out = sage_plugin.attention(q, k, v, kernel=kernel, variant="hopper", launch=config)
    assert torch.isnan(out[0, 4:]).any(-1).all()
    assert torch.isfinite(out[0, :4]).all()
