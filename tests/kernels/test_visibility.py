"""Which keys anyone sees, against the whole matrix of what each row sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from sage_plugin.kernels.attention import visibility
from sage_plugin.kernels.attention.visibility import (
    added_by_mask,
    alive_keys,
    hidden_by_mask,
    hidden_by_position,
)
from sage_plugin.kernels.contract import AttentionParams
from tests.kernels.problems import problems
from tests.matrix.definition import in_reach, seen_by


@settings(max_examples=80, deadline=None, derandomize=True)
@given(made=problems(longest=30))
def test_alive_keys_are_those_that_a_row_of_the_group_sees(made):
    shape, problem = made
    seen = seen_by(problem, shape.batch, shape.heads_q, shape.seq_q, shape.seq_k)
    expected = seen.any(2).unflatten(1, (shape.heads_k, -1)).any(2)
    found = alive_keys(
        problem, heads_k=shape.heads_k, seq_q=shape.seq_q, seq_k=shape.seq_k,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert expected.all() if found is None else found.expand_as(expected).equal(expected)


def test_a_dense_mask_is_read_in_chunks(monkeypatch):
    mask = torch.rand(2, 3, 50, 20, generator=torch.Generator().manual_seed(0)) > 0.97
    problem = AttentionParams(1.0, True, "bhsd", mask)
    expected = seen_by(problem, 2, 3, 50, 20).any(2)
    assert not expected.all()
    monkeypatch.setattr(visibility, "CHUNK_ELEMENTS", 700)
    found = alive_keys(problem, heads_k=3, seq_q=50, seq_k=20, device=mask.device)
    assert found.equal(expected)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(made=problems(longest=30))
def test_positions_of_a_block_of_keys(made):
    shape, problem = made
    problem = dataclasses.replace(problem, mask=None)
    rows = torch.arange(shape.seq_q).flip(0)
    found = hidden_by_position(
        rows, 5, 16, seq_q=shape.seq_q, seq_k=shape.seq_k, left=problem.left, right=problem.right
    )
    padded = torch.zeros(shape.seq_q, max(21, shape.seq_k), dtype=torch.bool)
    padded[:, : shape.seq_k] = in_reach(shape.seq_q, shape.seq_k, problem.causal, problem.window)
    expected = ~padded[rows, 5:21]
    assert not expected.any() if found is None else found.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_a_float_mask_hides_and_adds(dtype):
    lowest = torch.finfo(dtype).min
    mask = torch.tensor([0.0, -1e4, -2e38, lowest, -torch.inf, torch.nan]).to(dtype)
    small = dtype == torch.float16
    assert hidden_by_mask(mask).tolist() == [False, False, True, not small, True, False]
    added = added_by_mask(mask, torch.float64)
    assert added.dtype == torch.float64
    assert added[:3].tolist() == [0.0, mask[1].item(), 0.0]
    assert added[3].item() == (lowest if small else 0.0)
    assert added[4].item() == 0.0
    assert added[5].isnan()
    assert added_by_mask(mask == 0, torch.float32) is None
