"""Linears that are repeated from their recorded launches: the numbers of a call run anew."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.linear.backends.triton import products, rows
from sage_plugin.kernels.linear.rows.prologue import Prologue
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.linear.rows.row_format import row_format
from sage_plugin.kernels.linear.weight import quantize_weight
from sage_plugin.kernels.repeats import Repeats
from sage_plugin.schema import LinearLaunch
from tests.kernels.linear.test_triton import SMALL, drawn
from tests.kernels.raw_builds import RawKernel

pytestmark = pytest.mark.usefixtures("interpreted")
CPU = torch.device("cpu")


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Names of the kernels that builds ran on addresses."""
    found: list[str] = []
    for module, name in ((rows, "quantize_rows_kernel"), (products, "scaled_product_kernel")):
        monkeypatch.setattr(module, name, RawKernel(getattr(module, name), found))
    monkeypatch.setattr(launch_graph, "_stream", lambda device: "stream")
    return found


FORMATS = {
    "fp8_row": {},
    "int8_row": {"asymmetric": True},
    "fp8_tensor": {},
}


@pytest.mark.parametrize("kernel", FORMATS)
def test_rows(runs: list[str], kernel: str) -> None:
    """With all that they may read and write."""
    form, known = row_format(kernel, **FORMATS[kernel]), Repeats()
    smooth, norm = drawn(64).abs() + 1, Prologue("layer_norm", shift=drawn(2, 1, 64, seed=9))
    for step in range(4):
        x = drawn(2, 3, 64, seed=step)
        kept, expected = torch.empty_like(x), torch.empty_like(x)
        others = (smooth, *norm.tensors(), kept)
        made = rows._as_rows(
            *known.repeat((x, *others), CPU, rows._quantize, x, form, norm, *others), form
        )
        wanted = quantized_rows(x, form, smooth, norm, expected).flat()
        torch.testing.assert_close(made.scale, wanted.scale, rtol=1e-5, atol=0)
        torch.testing.assert_close(kept, expected)
    assert known.recorded is not None
    launches = 2 if kernel == "fp8_tensor" else 1
    assert runs == ["quantize_rows_kernel"] * 2 * launches


LAUNCHES = {"pointers": SMALL, "descriptors": SMALL.replaced(loads="descriptor", programs=1)}


@pytest.mark.parametrize("how", LAUNCHES)
@pytest.mark.parametrize("kernel", FORMATS)
def test_products(runs: list[str], kernel: str, how: str) -> None:
    launch: LinearLaunch = LAUNCHES[how]
    weight, bias = quantize_weight(drawn(40, 64), kernel, **FORMATS[kernel]), drawn(40, seed=1)
    known = Repeats()
    for step in range(4):
        given = quantized_rows(drawn(20, 64, seed=step), weight.row_format)
        # Addresses as a device's allocator gives them.
        tensors = tuple(
            None if t is None else t.clone()
            for t in (
                given.data, given.scale, given.offset, given.sums, weight.data, weight.scale,
                weight.offset, weight.sums, bias,
            )
        )  # fmt: skip
        args = (*tensors, torch.float32, launch)
        out = known.repeat(tensors, CPU, products._multiply, *args)[0]
        expected = products._multiply(*args)[0]
        assert torch.equal(out, expected)
    assert known.recorded is not None
    assert runs == ["scaled_product_kernel"] * 2
