"""Writing new keys and values to pages: in 16 bits exactly, in 8 bits by the largest so far."""

from __future__ import annotations

import pytest
import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.paged_attention.api import paged_attention
from sage_plugin.kernels.paged_attention.append import append_pages

LENS, ROWS, PAGE = (37, 16, 0, 5), (21, 1, 0, 5), 16
TABLE = torch.tensor([[3, 0, 7], [5, -1, -1], [-1, -1, -1], [99, -1, -1]])
WRITTEN = {3: 0, 0: 0, 7: 0, 5: 1}
"""Pages that exist, and whose they are."""


def drawn(cache: torch.dtype, dim: int = 20) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(1)
    new = (
        torch.randn(2, sum(ROWS), 2, dim, generator=rng)
        * torch.linspace(0.3, 4, sum(ROWS))[:, None, None]
    )
    held = (torch.randn(2, 9, PAGE, 2, dim, generator=rng) * 20).to(cache)
    scales = torch.rand(2, 9, 2, generator=rng) * 0.02 + 0.01
    return new, held, scales


def expected(new: torch.Tensor, held: torch.Tensor, unit: torch.Tensor | float) -> torch.Tensor:
    """What the pages stand for afterwards."""
    out = held.float() * unit
    row = 0
    for s, (length, rows) in enumerate(zip(LENS, ROWS, strict=True)):
        for at in range(length - rows, length):
            page = int(TABLE[s, at // PAGE])
            if page in WRITTEN:
                out[:, page, at % PAGE] = new[:, row]
            row += 1
    return out


@pytest.mark.parametrize("backend", ["emulation", "triton"])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_pages_hold_the_new_tokens_and_what_they_held(
    backend: str, cache: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if backend == "triton":
        request.getfixturevalue("interpreted")
    new, held, scales = drawn(cache)
    eight = cache.itemsize == 1
    new = new if eight else new.to(cache)
    unit = scales[:, :, None, :, None] if eight else 1.0
    right = expected(new, held, unit)
    before, given = held.clone(), {"k_scale": scales[0], "v_scale": scales[1]} if eight else {}
    ends = torch.tensor([0, *torch.tensor(ROWS).cumsum(0)])
    append_pages(*new, *held, TABLE, torch.tensor(LENS), ends, **given, backend=backend)
    others = [n for n in range(9) if n not in WRITTEN]
    assert torch.equal(held[:, others].float(), before[:, others].float())
    left = right[
        :, 7, 5:
    ].clone()  # behind the last token of its sequence: as it was, or of no meaning
    out = held.float() * unit
    out[:, 7, 5:], right[:, 7, 5:] = left, left
    if not eight:
        assert torch.equal(out, expected(new.float(), before, 1.0))
        return
    for page in WRITTEN:
        top = right[:, page].abs().amax((1, 3), keepdim=True)
        step = top / (127 if cache == torch.int8 else 14)
        assert ((out[:, page] - right[:, page]).abs() <= step * 1.1).all(), page
    # pages that were full of a sequence's own new tokens have the scale of the largest
    limit = 127.0 if cache == torch.int8 else 448.0
    torch.testing.assert_close(scales[:, 7], new[:, 16:21].abs().amax((1, 3)) / limit)


@pytest.mark.parametrize("backend", ["emulation", "triton"])
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
def test_a_page_that_fills_token_by_token_is_nearly_that_which_came_at_once(
    backend: str, cache: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if backend == "triton":
        request.getfixturevalue("interpreted")
    rng = torch.Generator().manual_seed(4)
    new = torch.randn(PAGE, 2, 16, generator=rng) * torch.linspace(1, 4, PAGE)[:, None, None]
    held, first = {}, new[0].abs().amax(-1) / (127 if cache == torch.int8 else 448)
    for step in (1, PAGE):
        caches = [torch.full((1, PAGE, 2, 16), 7.0).to(cache) for _ in "kv"]
        scales = {name: torch.full((1, 2), 99.0) for name in ("k_scale", "v_scale")}
        for end in range(step, PAGE + 1, step):
            rows = new[end - step : end]
            lens, ends = torch.tensor([end]), torch.tensor([0, step])
            append_pages(
                rows, rows, *caches, torch.tensor([[0]]), lens, ends, **scales, backend=backend
            )
        held[step] = caches[0][0].float() * scales["k_scale"][0][:, None]
        assert torch.equal(caches[0].float(), caches[1].float())
        growth = scales["k_scale"][0] / first
        top = new.abs().amax((0, 2)) / new[0].abs().amax(-1)
        if step == 1 and cache != torch.int8:  # powers of two: nothing is rounded twice
            top = torch.exp2(top.log2().ceil())
        torch.testing.assert_close(growth, top)
    for step, most in ((PAGE, 1.0), (1, 2.0 if cache == torch.int8 else 1.05)):
        lost = (held[step] - new).norm() / new.norm()
        assert lost < most * (0.011 if cache == torch.int8 else 0.027)


@pytest.mark.parametrize("backend", ["emulation", "triton"])
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("first", [0.0, 1e-42])
def test_a_page_that_begins_with_next_to_nothing_takes_what_comes(
    backend: str, cache: torch.dtype, first: float, request: pytest.FixtureRequest
) -> None:
    if backend == "triton":
        request.getfixturevalue("interpreted")
    caches = [torch.zeros(1, PAGE, 2, 16).to(cache) for _ in "kv"]
    scales = {name: torch.zeros(1, 2) for name in ("k_scale", "v_scale")}
    for end, value in enumerate((first, 3.0), start=1):
        rows = torch.full((1, 2, 16), value)
        append_pages(
            rows, rows, *caches, torch.tensor([[0]]), torch.tensor([end]), torch.tensor([0, 1]),
            **scales, backend=backend,
        )  # fmt: skip
    out = caches[0][0, :2].float() * scales["k_scale"][0][:, None]
    torch.testing.assert_close(out[1], torch.full((2, 16), 3.0))
    assert (out[0] == 0).all()


@pytest.mark.parametrize("backend", ["emulation", "triton"])
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_marks_its_page_and_head_until_that_begins_anew(
    backend: str, cache: torch.dtype, value: float, request: pytest.FixtureRequest
) -> None:
    if backend == "triton":
        request.getfixturevalue("interpreted")
    caches = [torch.zeros(2, PAGE, 2, 16).to(cache) for _ in "kv"]
    scales = {name: torch.zeros(2, 2) for name in ("k_scale", "v_scale")}

    def append(rows: torch.Tensor, end: int) -> list[bool]:
        append_pages(
            rows, torch.ones_like(rows), *caches, torch.tensor([[1, 0]]), torch.tensor([end]),
            torch.tensor([0, len(rows)]), **scales, backend=backend,
        )  # fmt: skip
        assert scales["v_scale"].isfinite().all()
        return scales["k_scale"].isnan().flatten().tolist()

    rows = torch.ones(3, 2, 16)
    rows[1, 1, 5] = value
    assert append(rows, 3) == [False, False, False, True]  # the second head of page 1
    out = paged_attention(
        torch.ones(1, 2, 16), *caches, torch.tensor([[1, 0]]), torch.tensor([3]),
        torch.tensor([0, 1]), **scales, kernel=f"fav2:{backend}",
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    assert out.isnan().all(-1).tolist() == [[False, True]]
    assert append(torch.ones(1, 2, 16), 4) == [False, False, False, True]
    assert append(torch.ones(4, 2, 16), 4) == [False] * 4


def test_what_does_not_fit_is_refused() -> None:
    new, held, scales = drawn(torch.int8)
    lens, ends = torch.tensor(LENS), torch.tensor([0, 21, 22, 22, 27])
    with pytest.raises(UnsupportedInputError, match="8-bit caches need both"):
        append_pages(*new, *held.to(torch.float8_e4m3fn), TABLE, lens, ends)
    with pytest.raises(UnsupportedInputError, match="2 key heads, D"):
        append_pages(*new.repeat(1, 1, 2, 1), *held, TABLE, lens, ends,
                     k_scale=scales[0], v_scale=scales[1])  # fmt: skip
