"""The Triton kernels of paged attention beside the definition, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.executor import resolve
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.paged_records import PagedLaunch
from tests.kernels.paged_attention.problems import CASES, DECODE, ROWS, draw, error, tolerance

pytestmark = pytest.mark.usefixtures("interpreted", "nan_scratch")

LAUNCHES = {
    "one": PagedLaunch(32, 16, 4, 1, splits=1),
    "split": PagedLaunch(32, 32, 4, 1, splits=2),
    "described": PagedLaunch(32, 16, 4, 1, splits=1, loads="descriptor"),
}
TURNS = ("one", "described", "split", "described", "one", "described")
"""Splits take three times as long, for the sake of the rows that are combined."""

SWEPT = (
    "int8 long pages",
    "odd pages",
    "long integers",
    "all see all",
    "fp16",
    "fp8 without scales",
)
"""What tells the kernels nothing that other cases do not: a number here, a dtype there."""

GRID = [
    pytest.param(*case, launch, id=f"{'-'.join(case)}-{launch}",
                 marks=[] if own == launch and case[0] not in SWEPT else pytest.mark.sweep)
    for case, own in zip(CASES, itertools.cycle(TURNS), strict=False)
    for launch in LAUNCHES
]  # fmt: skip
"""Most cases with one launch config in every run, and with the others in a sweep."""


@pytest.mark.parametrize(("name", "kernel", "launch"), GRID)
def test_as_defined_with_poison_around(name: str, kernel: str, launch: str) -> None:
    problem, config = ROWS[name], LAUNCHES[launch]
    if config.loads == "descriptor" and (problem.page % 16 or problem.head_dim == 80):
        config = config.replaced(loads="pointer")
    drawn = draw(problem)
    call = PagedCall(*drawn.args, return_lse=True, **drawn.kwargs)
    out, lse = resolve(call, BackendRequest(kernel, "triton", config)).run(call)
    assert error(out, drawn.out) < tolerance(problem, kernel)
    exact = kernel == "fav2" and not problem.cache
    torch.testing.assert_close(lse.double(), drawn.lse, rtol=0, atol=1e-5 if exact else 0.1)


def test_lengths_that_do_not_fit_read_and_write_nothing_outside() -> None:
    """On a GPU nobody reads them; they are clamped to what the tensors have place for."""
    drawn = draw(DECODE.but(lens=(37, 16), rows=(1, 1)))
    q, k, v, table, _, _ = drawn.args
    for lens, ends in itertools.product(((999, -5), (16, 16)), ((0, 1, 99), (-3, 1, 2))):
        given = (torch.tensor(x, dtype=torch.int32) for x in (lens, ends))
        call = PagedCall(q, k, v, table, *given)
        out, _ = resolve(call, BackendRequest("fav2", "triton", LAUNCHES["one"])).run(call)
        assert out.shape == q.shape
    lens = torch.tensor([999, -5], dtype=torch.int32)
    call = PagedCall(q, k.nan_to_num(), v.nan_to_num(), table, lens, drawn.args[5])
    out, _ = resolve(call, BackendRequest("fav2", "triton", LAUNCHES["one"])).run(call)
    assert out.isfinite().all()
    assert not out[1].any()


@pytest.mark.parametrize("name", ["ragged", "sinks"])
def test_splits_of_short_sequences_beside_a_prompt(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixed batch has a launch for sequences of a tile at most, with splits of its own."""
    monkeypatch.setenv("SAGE_PLUGIN_PAGED_LAUNCH", '{"splits": 3, "block_n": 16}')
    problem = ROWS[name].but(lens=(42, 70, 0, 19, 33), rows=(21, 1, 2, 7, 8))
    drawn = draw(problem)
    call = PagedCall(*drawn.args, return_lse=True, **drawn.kwargs)
    out, lse = resolve(call, BackendRequest("fav2", "triton", LAUNCHES["one"])).run(call)
    assert error(out, drawn.out) < tolerance(problem, "fav2")
    torch.testing.assert_close(lse.double(), drawn.lse, rtol=0, atol=1e-5)
