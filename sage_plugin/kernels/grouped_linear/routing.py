"""Rows sorted by the expert that each token is sent to, and what the experts gave put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin import device
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.surroundings import are_plain, on_device

WIDE = 8
"""Bytes that are gathered as one number where rows are whole ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which token each row of a grouped linear is, sorted by expert.

    Attributes:
        order: `(S * k,)` places of the rows among the tokens' choices, token by token.
        group_sizes: `(E,)` int32 rows of each expert; the rows after them belong to none.
        choices: experts of a token, k.
    """

    order: torch.Tensor
    group_sizes: torch.Tensor
    choices: int


def routing_of(experts: torch.Tensor, groups: int) -> Routing:
    """Sort the choices of tokens by expert; traceable, and nothing is read on the host.

    Args:
        experts: `(S, k)` expert of each choice; `groups` or more for one that is elsewhere.
        groups: experts that are here, E.

    Example:
        >>> routing_of(torch.tensor([[2, 0], [2, 3]]), 3).group_sizes
        tensor([1, 0, 2], dtype=torch.int32)
    """
    sorted_experts, order = experts.reshape(-1).to(torch.int32).sort(stable=True)
    numbers = torch.arange(groups + 1, dtype=torch.int32, device=experts.device)
    bounds = torch.searchsorted(sorted_experts, numbers, out_int32=True)
    return Routing(order, bounds.diff(), experts.shape[1])


def gathered(rows: QuantizedRows, routing: Routing) -> QuantizedRows:
    """Return the quantized row of each choice's token, sorted by expert; traceable.

    Args:
        rows: `(S, K)`.
        routing: where they go.

    Returns:
        `(S * k, K)` rows.
    """
    token = routing.order // routing.choices
    data = rows.data
    wide = torch.int64 if data.shape[1] % WIDE == 0 and are_plain(data) else torch.int8
    picked = data.view(wide).index_select(0, token).view(data.dtype)
    return QuantizedRows(picked, rows.scale.index_select(0, token))


def combined(
    rows: torch.Tensor, weights: torch.Tensor, routing: Routing, dtype: torch.dtype
) -> torch.Tensor:
    """Sum the rows of each token with its weights, in fp32; traceable.

    Args:
        rows: `(S * k, N)` sorted by expert.
        weights: `(S, k)`.
        routing: how they were sorted.
        dtype: dtype of the output.

    Returns:
        `(S, N)`.
    """
    order = routing.order
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    if rows.is_cuda and are_plain(rows, weights) and device.triton_version():
        from sage_plugin.kernels.grouped_linear.backends.triton.combine_kernel import combine_triton

        with on_device(rows.device):
            return combine_triton(rows, weights, place, dtype)
    chosen = rows[place].view(*weights.shape, -1).float()
    return (chosen * weights.float()[:, :, None]).sum(1).to(dtype)
