"""Writing new keys and values to pages: in 16 bits exactly, in 8 bits by the largest so far."""

from __future__ import annotations

import pytest
import torch

from sage_plugin.errors import UnsupportedInputError
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


def test_what_does_not_fit_is_refused() -> None:
    new, held, scales = drawn(torch.int8)
    lens, ends = torch.tensor(LENS), torch.tensor([0, 21, 22, 22, 27])
    with pytest.raises(UnsupportedInputError, match="8-bit caches need both"):
        append_pages(*new, *held.to(torch.float8_e4m3fn), TABLE, lens, ends)
    with pytest.raises(UnsupportedInputError, match="2 key heads, D"):
        append_pages(*new.repeat(1, 1, 2, 1), *held, TABLE, lens, ends,
                     k_scale=scales[0], v_scale=scales[1])  # fmt: skip
