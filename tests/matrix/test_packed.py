"""Packed sequences are calls of their own, by every kernel, in every place."""

from __future__ import annotations

import itertools

import pytest
import torch

import sage_plugin
from tests.kernels.calls import EMULATED, Shape, launch
from tests.matrix.places import MARKS, OF_TORCH, PLACES, hold
from tests.matrix.row import Case, Row

ENDS = {
    "one length": ([0, 5, 43, 44], [0, 5, 43, 44]),
    "other keys": ([0, 5, 43, 44], [0, 40, 41, 70]),
    "empty ones": ([0, 7, 7, 16, 16, 20], [0, 8, 11, 11, 11, 15]),
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "all": {"is_causal": True, "window": (25, -1), "softcap": 8.0, "scale": 0.2, "sinks": True},
}
CELLS = [
    pytest.param(kernel, place.name, id=f"{kernel}-{place.name}", marks=MARKS.get(place.name, []))
    for place in PLACES.values() if place.name != "hopper"
    for kernel in (OF_TORCH if place.name == "torch" else EMULATED)
]  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


def packed(ends_q, ends_k, device, dtype, dim=32):
    """Q, K and V whose means differ from sequence to sequence."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(ends[-1], heads, dim, generator=generator)
        for ends, heads in ((ends_q, 4), (ends_k, 2), (ends_k, 2))
    )
    for at, (first, last) in enumerate(itertools.pairwise(ends_k)):
        k[first:last] += 10.0 * at - 20.0
        v[first:last] += 0.5 + at
    return [x.to(device, dtype) for x in (q, k, v)]


@pytest.mark.parametrize(("kernel", "place"), CELLS)
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("parts", OPTIONS)
def test_report_21_28_packed_sequences_are_calls_of_their_own(kernel, place, name, parts, request):
    place = PLACES[place]
    if place.name == "interpreter":
        if (name == "one length") != (parts == "plain") and kernel != "fav2":
            pytest.skip("two of the nine are enough for each kernel there")
        request.getfixturevalue("interpreted")
    ends_q, ends_k = ENDS[name]
    if place.device == "cuda":
        ends_q, ends_k = ([13 * n for n in ends] for ends in (ends_q, ends_k))
    dim = {"plain": 80, "causal": 32, "all": 64}[parts]
    dtype = torch.float32 if place.name == "torch" else torch.float16
    q, k, v = packed(ends_q, ends_k, place.device, dtype, dim)
    options = dict(OPTIONS[parts])
    if "sinks" in options:
        options["sinks"] = torch.arange(4.0, device=q.device)
    how = {"kernel": kernel, "return_lse": True, "out_dtype": torch.float32}
    if place.name != "torch":
        how |= {
            "variant": place.variant,
            "launch": launch(64 if place.device == "cuda" else 32, 32),
        }
    # NaN behind the last sequence is nobody's.
    q, k, v = (torch.cat([x, torch.full_like(x[:9], torch.nan)]) for x in (q, k, v))
    cu = [torch.tensor(ends, dtype=torch.int32, device=q.device) for ends in (ends_q, ends_k)]
    longest = [max(last - first for first, last in itertools.pairwise(e)) for e in (ends_q, ends_k)]
    before = [x.clone() for x in (q, k, v, *cu)]
    out, lse = sage_plugin.attention_varlen(q, k, v, *cu, *longest, **options, **how)
    for x, old in zip((q, k, v, *cu), before, strict=True):
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)
    assert out.shape == q.shape
    assert (lse.shape, lse.dtype) == ((4, len(q)), torch.float32)
    assert lse.is_contiguous()
    row = Row(name, small=Shape(), times=6)
    for at in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[at : at + 2]), slice(*ends_k[at : at + 2])
        if rows.start == rows.stop:
            continue
        own = Case(*(x[s].transpose(0, 1)[None] for x, s in ((q, rows), (k, keys), (v, keys))),
                   None, options)  # fmt: skip
        found, found_lse = out[rows].transpose(0, 1)[None], lse[None, :, rows]
        if keys.start == keys.stop:
            sink = options.get("sinks", torch.full((4,), -torch.inf, device=q.device))
            assert (found == 0).all()
            torch.testing.assert_close(found_lse, sink[None, :, None].expand_as(found_lse))
            continue
        hold(kernel, row, own, found, found_lse, *own.definition())
        alone, alone_lse = sage_plugin.attention(own.q, own.k, own.v, **options, **how)
        exact = {"rtol": 1e-5, "atol": 1e-5} if place.name == "torch" else {"rtol": 0, "atol": 1e-6}
        torch.testing.assert_close(found, alone, **exact)
        torch.testing.assert_close(found_lse, alone_lse, **exact)
