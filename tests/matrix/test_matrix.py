"""Every feature of an attention call, by every kernel, in every place."""

from __future__ import annotations

import functools

import pytest
import torch

import sage_plugin
from tests.kernels.calls import FP8_WEIGHTS, relative_l1
from tests.matrix.places import OF_TORCH, PLACES, cells, distance, hold, limit_of, skip_unsupported
from tests.matrix.rows import ROWS

NAMES = {str(row): row for row in ROWS}


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


@functools.lru_cache(maxsize=8)
def expected(name, place):
    """The answer to a row, once for all kernels."""
    return PLACES[place].case(NAMES[name]).definition()


@pytest.mark.parametrize(("name", "kernel", "place"), cells(NAMES, PLACES))
def test_an_answer_is_that_of_the_definition(name, kernel, place, request):
    row, place = NAMES[name], PLACES[place]
    if place.name == "interpreter":
        request.getfixturevalue("interpreted")
        request.getfixturevalue("nan_scratch")
    case = place.case(row)
    skip_unsupported(kernel, place, row, case)
    given = [x for x in (case.q, case.k, case.v, case.mask, case.options.get("sinks"))
             if x is not None]  # fmt: skip
    before = [x.clone() for x in given]
    wide = {"return_lse": True, "out_dtype": torch.float32}
    out, lse = place.answer(kernel, row, case, **wide)
    for x, old in zip(given, before, strict=True):
        assert torch.equal(x, old) or x.isnan().any()
    wanted, wanted_lse = expected(name, place.name)
    hold(kernel, row, case, out, lse, wanted, wanted_lse)
    if place.name in ("interpreter", "gpu", "hopper"):
        hold_to_emulation(kernel, place, row, case, out, lse, wanted, wanted_lse)
    if place.name in ("emulation", "torch"):
        hold_forms(kernel, place, row, case, out)
    for other in row.wrong(case):
        far = relative_l1(other.definition()[0], out)
        assert far > max(2 * relative_l1(wanted, out), limit_of(kernel, row) / row.times)
    for other in row.same(case):
        if kernel in ("sdpa", "auto") and not other.v.isfinite().all():
            continue  # SDPA multiplies hidden values by 0
        again = place.answer(kernel, row, other, **wide)[0]
        hold_same(kernel, place, case, again, out)


def hold_to_emulation(kernel, place, row, case, out, lse, wanted, wanted_lse):
    """Device code is as exact as its emulation, and in the interpreter equal but for sums."""
    options = case.options | place.options(kernel, row, case) | {"variant": "emulation"}
    options |= {"return_lse": True, "out_dtype": torch.float32}
    twin, twin_lse = sage_plugin.attention(case.q, case.k, case.v, case.mask, **options)
    visible = wanted_lse.isfinite()
    if place.name == "interpreter":
        assert (out - twin).abs().mean() <= 1e-3 * twin.abs().mean() + 1e-37
        assert distance(lse, twin_lse.double(), visible) < 0.02
        return
    more = row.truncated if place.name == "hopper" and kernel in FP8_WEIGHTS else 2e-4
    size = wanted.abs().mean() + 1e-37
    error, twins = ((x.double() - wanted).abs().mean() / size for x in (out, twin))
    assert error <= 1.2 * twins + more
    limit = 1.5 * distance(twin_lse, wanted_lse, visible) + 2e-3
    assert distance(lse, wanted_lse, visible) <= limit


def hold_forms(kernel, place, row, case, out):
    """Rows before heads, no LSE and the dtype of V change nothing but the last rounding."""
    turned = case.each(lambda x: x.transpose(1, 2).contiguous())
    other = place.answer(kernel, row, turned, layout="bshd", out_dtype=torch.float32)
    close = {"rtol": 1e-4, "atol": 1e-5} if kernel in OF_TORCH else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(other.transpose(1, 2), out, **close)
    narrow = place.answer(kernel, row, turned, layout="bshd")
    assert narrow.dtype == case.v.dtype
    torch.testing.assert_close(narrow, other.to(narrow.dtype), rtol=0, atol=0)


def hold_same(kernel, place, case, again, out):
    """The same call in other words has the same bits."""
    innermost = all(x.stride(3) == 1 for x in (case.q, case.k, case.v))
    if kernel in OF_TORCH or (place.device == "cuda" and not innermost):
        # The compiler reads such tensors in another order, and a mean's last bits follow it.
        assert relative_l1(again, out) < 5e-3
    else:
        assert torch.equal(again, out)
