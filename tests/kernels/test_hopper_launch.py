"""How many programs the launch code of the Hopper variants starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from sage_plugin.kernels import tape
from sage_plugin.kernels.attention import hopper
from sage_plugin.kernels.contract import Problem
from sage_plugin.kernels.quant.recipe import Recipe
from tests.kernels.calls import Shape, draw, hopper_launch

CUDA = torch.device("cuda", 0)


def test_tiles_share_no_more_programs_than_there_are_multiprocessors(monkeypatch):
    monkeypatch.setattr(hopper.devices, "facts", lambda _: SimpleNamespace(sm_count=132))
    assert [hopper._programs(tiles, CUDA) for tiles in (1, 131, 132, 133, 2064)] == [
        1, 131, 132, 132, 132
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("persistent", "causal", "programs"),
    [(True, False, 5), (False, False, 24), (True, True, 24), (False, True, 24)],
)
def test_a_causal_tile_has_a_program_of_its_own(persistent, causal, programs, monkeypatch):
    """Two sequences of four heads and 500 rows: three tiles of 192 rows each."""
    started = {}

    def launch(kernel, count, *_arguments, **_options):
        started[getattr(kernel, "__name__", "")] = count

    monkeypatch.setattr(tape, "launch", launch)
    monkeypatch.setattr(hopper, "_programs", lambda tiles, _: min(tiles, 5))
    built = hopper.QuantisedHopper(Recipe("int8", "fp8"))
    q, k, v = draw(Shape(2, 4, 2, 500, 600, 64))
    problem = Problem(0.125, causal, "bhsd")
    config = hopper_launch(persistent=persistent)
    built.launch(built.prepare(q, k, v, problem=problem, launch=config))
    assert started["hopper_attention_kernel"] == programs
