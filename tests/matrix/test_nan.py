"""NaN of a key shows in the rows that see it, and in no other; two parts of K merge."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.calls import EMULATED, relative_l1
from tests.matrix.definition import in_reach
from tests.matrix.masks import bias, keeping, tiles
from tests.matrix.places import MARKS, PLACES, cells, limit_of, skip_unsupported
from tests.matrix.row import LARGE, SMALL, Row

SEEN = {
    "padding": Row("padding", mask=keeping("keys of each item")),
    "padding of heads": Row("padding of heads", mask=keeping("keys of each head")),
    "bias of heads": Row("bias of heads", mask=bias("keys of each head")),
    "rows": Row("rows", mask=keeping("rows and keys")),
    "tiles": Row("tiles", mask=tiles(), options={"softcap": 5.0}),
    "bias of rows": Row("bias of rows", mask=bias("rows of each item")),
    "causal and padding": Row("causal", mask=keeping("keys of each item"),
                              options={"is_causal": True}),
    "window": Row("window", options={"window": (10, 3)}),
}  # fmt: skip
CELLS = cells(SEEN, ("emulation", "interpreter", "gpu", "hopper"))


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


@pytest.mark.parametrize(("name", "kernel", "place"), CELLS)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_shows_in_the_rows_that_see_it_and_in_no_other(name, kernel, place, which, request):
    row, place = SEEN[name], PLACES[place]
    if place.name == "interpreter":
        request.getfixturevalue("interpreted")
    case = place.case(row)
    skip_unsupported(kernel, place, row, case)
    at = 5 if which == "q" else case.k.shape[2] - 8
    bad = getattr(case, which).clone()
    bad[-1, :, at, 3] = torch.inf if which == "v" else torch.nan
    out, lse = place.answer(kernel, row, case.but(**{which: bad}), return_lse=True,
                            out_dtype=torch.float32)  # fmt: skip
    seen = in_reach(case.q.shape[2], case.k.shape[2], case.options.get("is_causal", False),
                    case.options.get("window")).to(out.device)  # fmt: skip
    if case.mask is not None:
        seen = seen & (case.mask if case.mask.dtype == torch.bool else case.mask >= -1e38)
    seen = seen.expand(*case.q.shape[:3], -1)
    if which == "q":
        sees = seen.any(-1) & (torch.arange(case.q.shape[2], device=out.device) == at)
    else:
        sees = seen[..., at].clone()
    sees[:-1] = False
    assert sees.any()
    assert torch.equal(~out.isfinite().all(-1), sees)
    wanted, wanted_lse = case.definition()
    assert relative_l1(out[~sees], wanted[~sees]) < limit_of(kernel, row)
    others = ~sees & wanted_lse.isfinite()
    assert (lse - wanted_lse)[others].abs().max() < 0.5


MERGED = [
    Row(f"a mean of {mean}{', rotated' * bool(block)}", small=small, large=LARGE,
        mask=mask, launch={"hadamard": block}, times=4,
        change=lambda case, mean=mean: case.but(k=case.k + mean))
    for mean, block, mask, small in (
        (0.0, 0, None, SMALL), (50.0, 32, None, SMALL), (50.0, 0, keeping("rows and keys"), SMALL),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "place"),
    [pytest.param(kernel, place, id=f"{kernel}-{place}", marks=MARKS.get(place, []))
     for place in ("emulation", "interpreter", "gpu", "hopper") for kernel in EMULATED
     if place != "hopper" or kernel != "fav2"],
)  # fmt: skip
@pytest.mark.parametrize("row", MERGED, ids=str)
def test_report_67_two_parts_of_k_merge_to_the_whole(row, kernel, place, request):
    place = PLACES[place]
    if kernel == "fav2" and row.launch["hadamard"]:
        pytest.skip("fav2 does not rotate")
    if place.name == "interpreter":
        if kernel in ("fav3_fp8",):
            pytest.skip("the LSE is the same code in all quantized kernels")
        request.getfixturevalue("interpreted")
    case = place.case(row)
    skip_unsupported(kernel, place, row, case)
    wide = {"return_lse": True, "out_dtype": torch.float32}
    cut = case.k.shape[2] // 3
    parts = [
        place.answer(
            kernel,
            row,
            case.but(
                k=case.k[:, :, part],
                v=case.v[:, :, part],
                mask=None if case.mask is None else case.mask[..., part],
            ),
            **wide,
        )
        for part in (slice(0, cut), slice(cut, None))
    ]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * torch.exp(lse - total)[..., None] for out, lse in parts)
    wanted, wanted_lse = case.definition()
    assert relative_l1(merged, wanted) < limit_of(kernel, row)
    assert (total - wanted_lse).abs().max() < 0.15
