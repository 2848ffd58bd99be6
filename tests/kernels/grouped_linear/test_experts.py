"""Routing, and experts as two grouped linears, beside a loop over tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sage_plugin.kernels.grouped_linear.backends.triton.combine_kernel import combine_triton
from sage_plugin.kernels.grouped_linear.backends.triton.routing_kernel import route_triton
from sage_plugin.kernels.grouped_linear.experts import Experts, run_experts
from sage_plugin.kernels.grouped_linear.routing import Routing, combined, routing_of
from sage_plugin.kernels.grouped_linear.weight import quantize_weights
from sage_plugin.kernels.linear.backends.triton.rows import quantize_rows_triton
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.linear.rows.row_format import row_format
from tests.kernels.grouped_linear.cases import loss

TOKENS, GROUPS, CHOICES, HIDDEN, INNER = 9, 4, 2, 32, 48


def drawn():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    up = torch.randn(GROUPS, 2 * INNER, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(GROUPS, HIDDEN, INNER, generator=generator) * INNER**-0.5
    # GROUPS marks an expert that is elsewhere
    chosen = torch.randint(0, GROUPS + 1, (TOKENS, CHOICES), generator=generator)
    return x, up, down, chosen, torch.rand(TOKENS, CHOICES, generator=generator)


def looped(x, up, down, chosen, weights, biases, between) -> torch.Tensor:
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for choice in range(CHOICES):
            expert = int(chosen[token, choice])
            if expert < GROUPS:
                inner = up[expert].double() @ x[token].double() + biases[0][expert].double()
                row = down[expert].double() @ between(inner) + biases[1][expert].double()
                out[token] += weights[token, choice].double() * row
    return out


def swiglu(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def interleaved(inner: torch.Tensor) -> torch.Tensor:
    return torch.tanh(inner[..., ::2]) * inner[..., 1::2]


@pytest.mark.parametrize("between", [None, interleaved], ids=["swiglu", "own"])
@pytest.mark.parametrize("kernel", ["fp8_row", "int8_row"])
def test_tokens_go_through_the_experts_that_are_here(kernel: str, between) -> None:
    x, up, down, chosen, weights = drawn()
    biases = torch.linspace(-1, 1, GROUPS * 2 * INNER).view(GROUPS, -1), torch.ones(GROUPS, HIDDEN)
    experts = Experts(
        quantize_weights(up, kernel), quantize_weights(down, kernel), *biases, between=between
    )
    expected = looped(x, up, down, chosen, weights, biases, between or swiglu)
    assert loss(run_experts(x, chosen, weights, experts), expected) < 0.05


def check_routing(routing: Routing, chosen: torch.Tensor) -> None:
    """Rows lie by expert, those that are elsewhere last, and sizes are counts."""
    assert sorted(routing.places.flatten().tolist()) == list(range(chosen.numel()))
    of_rows = chosen.flatten()[routing.order()]
    assert of_rows.tolist() == sorted(chosen.flatten().tolist())
    counts = torch.bincount(chosen.flatten(), minlength=GROUPS + 1)[:GROUPS]
    assert routing.group_sizes.tolist() == counts.tolist()
    assert routing.group_sizes.dtype == torch.int32


def test_routing_sorts_rows_by_expert_and_counts_those_that_are_here() -> None:
    chosen = drawn()[3]
    check_routing(routing_of(chosen, GROUPS), chosen)


@pytest.mark.usefixtures("interpreted", "nan_scratch")
def test_the_kernels_that_route_sort_too() -> None:
    chosen = torch.randint(-1, GROUPS + 3, (150, 2), generator=torch.Generator().manual_seed(3))
    elsewhere = chosen.masked_fill((chosen < 0) | (chosen >= GROUPS), GROUPS)
    check_routing(Routing(*route_triton(chosen, GROUPS)), elsewhere)


@pytest.mark.usefixtures("interpreted", "nan_scratch")
@pytest.mark.parametrize("kernel", ["fp8_row", "int8_row"])
def test_a_quantized_row_goes_to_all_of_its_places(kernel: str) -> None:
    x, places = torch.randn(6, 96), torch.randperm(18).view(6, 3).to(torch.int32)
    expected = quantized_rows(x, row_format(kernel))
    made = quantize_rows_triton(x, row_format(kernel), copies=places)
    for rows in (made, expected.copied(places)):
        for row in range(6):
            for place in places[row].tolist():
                assert torch.equal(rows.data[place].float(), expected.data[row].float())
                torch.testing.assert_close(rows.scale[place], expected.scale[row])


@pytest.mark.usefixtures("interpreted", "nan_scratch")
def test_the_kernel_that_combines_sums_as_torch_does() -> None:
    _, _, _, chosen, weights = drawn()
    routing = routing_of(chosen, GROUPS)
    rows = torch.randn(TOKENS * CHOICES, 200, dtype=torch.bfloat16)
    expected = combined(rows, weights, routing, torch.bfloat16)
    made = combine_triton(rows, weights, routing.places, torch.bfloat16)
    torch.testing.assert_close(made, expected)
