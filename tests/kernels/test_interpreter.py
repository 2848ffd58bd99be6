"""What the tests change in Triton's interpreter leaves its own checks in place."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def _applied(x, y, HOW: tl.constexpr):
    if HOW == 0:
        return x + y
    if HOW == 1:
        return x - y
    return x * y


@triton.jit
def _combined_kernel(x, y, out, HOW: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(out + at, _applied(tl.load(x + at), tl.load(y + at), HOW))


def combined(x: list[int], y: list[int], how: int) -> list[int]:
    tensors = [torch.tensor(values, dtype=torch.int32) for values in (x, y, [0] * 4)]
    _combined_kernel[(1,)](*tensors, HOW=how)
    return tensors[2].tolist()


def test_integers_that_fit_are_combined() -> None:
    x, y = [1, -2, 3, 2**30], [5, 7, -9, 1]
    assert combined(x, y, 0) == [6, 5, -6, 2**30 + 1]
    assert combined(x, y, 1) == [-4, -9, 12, 2**30 - 1]
    assert combined(x, y, 2) == [5, -14, -27, 2**30]


@pytest.mark.parametrize(
    ("how", "x", "y"), [(0, 2**31 - 1, 1), (1, -(2**31), 1), (2, 2**16, 2**15)]
)
def test_one_that_overflows_is_an_error(how: int, x: int, y: int) -> None:
    with pytest.raises(Exception, match="overflow"):
        combined([0, 0, 0, x], [0, 0, 0, y], how)
