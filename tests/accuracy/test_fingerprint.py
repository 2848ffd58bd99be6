"""A fingerprint sees every value where it lies, and takes few operations for any shape."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sage_plugin.accuracy import fingerprint as fingerprints
from sage_plugin.accuracy.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_fingerprint_sees_value_position_shape_and_dtype(dtype):
    a = torch.arange(24).to(dtype).view(2, 3, 4)
    changed, swapped = a.clone(), a.clone()
    changed[1, 2, 3] += 1
    swapped[0, 0, 0], swapped[0, 0, 1] = a[0, 0, 1], a[0, 0, 0]
    others = [changed, swapped, a.view(3, 2, 4), a.to(torch.int16), a.flip(0)]
    assert len({fingerprint(x) for x in (a, *others)}) == 6


def test_fingerprint_does_not_depend_on_how_much_is_looked_at_together(monkeypatch):
    masks = [torch.rand(1, 1, 37, 41) > 0.5, torch.randn(2, 1, 37, 41), torch.randn(9, 5, 2, 3, 2)]
    whole = [fingerprint(mask) for mask in masks]
    monkeypatch.setattr(fingerprints, "CHUNK_ELEMENTS", 64)
    assert [fingerprint(mask) for mask in masks] == whole
    masks[0][0, 0, 36, 40] ^= True
    assert fingerprint(masks[0]) != whole[0]


def test_fingerprint_reads_a_strided_view_as_its_values():
    a = torch.randn(2, 5, 3, 4)
    assert fingerprint(a.transpose(1, 2)) == fingerprint(a.transpose(1, 2).contiguous())


@pytest.mark.parametrize("chunk", [7, 30, 1 << 24])
@pytest.mark.parametrize(
    "shape", [(), (5,), (3, 4), (0, 4), (2, 3, 0, 4), (2, 3, 4), (3, 2, 2, 3, 2)]
)
def test_fingerprint_sees_each_value_of_any_shape(shape, chunk, monkeypatch):
    monkeypatch.setattr(fingerprints, "CHUNK_ELEMENTS", chunk)
    a = torch.randn(shape)
    seen = {fingerprint(a)}
    for at in range(a.numel()):
        other = a.clone()
        other.view(-1)[at] += 1
        seen.add(fingerprint(other))
    assert len(seen) == 1 + a.numel()


def test_fingerprint_of_many_small_matrices_takes_few_operations():
    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += 1
            return function(*args, **(kwargs or {}))

    with Count() as count:
        fingerprint(torch.zeros(4096, 16, 2, 4))
    assert count.operations < 40
