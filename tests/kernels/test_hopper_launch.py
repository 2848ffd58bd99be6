"""What the launch code of the Hopper variants starts: programs, and a launch that joins pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.attention.backends.hopper import launch as hopper
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize.recipe import Recipe
from tests.kernels.calls import Shape, draw, hopper_launch


@pytest.fixture
def started(monkeypatch):
    """Programs, arguments and constants of each launch by its kernel's name; five processors."""
    launches = {}

    def launch(kernel, programs, *arguments, **options):
        name = getattr(kernel, "__name__", "prepass_kernel")
        launches[name] = SimpleNamespace(programs=programs, arguments=arguments, **options)

    monkeypatch.setattr(launch_graph, "launch", launch)
    monkeypatch.setattr(hopper.devices, "facts", lambda _: SimpleNamespace(sm_count=5))
    return launches


def run(shape, *, causal=False, return_lse=False, **fields):
    built = hopper.QuantizedHopper(Recipe("int8", "fp8"))
    problem = AttentionParams(0.125, causal, "bhsd")
    config = hopper_launch(**fields)
    operands = built.prepare(*draw(shape), problem=problem, launch=config)
    return built.launch(operands, return_lse=return_lse)


@pytest.mark.parametrize(
    ("persistent", "causal", "programs"),
    [(True, False, 5), (False, False, 24), (True, True, 24), (False, True, 24)],
)
def test_a_causal_tile_has_a_program_of_its_own(persistent, causal, programs, started):
    """Two sequences of four heads and 500 rows: three tiles of 192 rows each."""
    run(Shape(2, 4, 2, 500, 600, 64), causal=causal, persistent=persistent)
    assert started["hopper_attention_kernel"].programs == programs
    assert "combine_kernel" not in started


@pytest.mark.parametrize(("heads", "programs"), [(1, 3), (4, 5)])
def test_no_more_programs_than_tiles_share_few_blocks(heads, programs, started):
    """Three tiles a head, of five key blocks."""
    run(Shape(1, heads, heads, 500, 600, 64), persistent=True)
    assert started["hopper_attention_kernel"].programs == programs


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_last_tiles_are_joined_from_pieces(return_lse, started):
    """Twelve tiles of 16 blocks: ten are whole, two take 32 blocks of five programs."""
    out, lse = run(Shape(1, 4, 2, 500, 2048, 64), return_lse=return_lse, persistent=True)
    attention, merge = started["hopper_attention_kernel"], started["combine_kernel"]
    assert attention.programs == 5
    assert attention.CONFIG.SPLIT
    assert merge.programs * merge.CONFIG.ROWS == 2 * merge.CONFIG.BLOCK_M == 2 * 192
    outs, sums = merge.arguments[3:5]
    assert outs.shape == (7, 192, 64)
    assert sums.shape == (7, 192)
    assert {outs.dtype, sums.dtype} == {torch.float32}
    pieces = attention.arguments[5]
    assert [t.data_ptr() for t in (outs, sums)] == [t.data_ptr() for t in pieces]
    assert merge.arguments[0].data_ptr() == out.data_ptr()
    assert merge.arguments[1] is lse
    assert merge.CONFIG.LSE == attention.CONFIG.LSE == (lse is not None) == return_lse
