"""Which row each choice of a token is, sorted by expert, and the sum of what experts gave."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin import device
from sage_plugin.kernels.surroundings import are_plain, on_device


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where the rows of tokens lie, sorted by expert.

    Attributes:
        places: `(S, k)` int32 row of each choice, none of them twice; rows of one expert have no
            order among them.
        group_sizes: `(E,)` int32 rows of each expert; the rows after them belong to none.
    """

    places: torch.Tensor
    group_sizes: torch.Tensor

    def order(self) -> torch.Tensor:
        """Return the choice that each row is, token by token."""
        return self.places.flatten().argsort()


def routing_of(experts: torch.Tensor, groups: int) -> Routing:
    """Sort the choices of tokens by expert; traceable, and nothing is read on the host.

    Args:
        experts: `(S, k)` expert of each choice; `groups` or more for one that is elsewhere.
        groups: experts that are here, E.

    Example:
        >>> routing_of(torch.tensor([[2, 0], [2, 3]]), 3).group_sizes
        tensor([1, 0, 2], dtype=torch.int32)
    """
    if experts.is_cuda and are_plain(experts) and device.triton_version():
        from sage_plugin.kernels.grouped_linear.backends.triton.routing_kernel import route_triton

        with on_device(experts.device):
            return Routing(*route_triton(experts, groups))
    ordered, order = experts.reshape(-1).to(torch.int32).sort(stable=True)
    numbers = torch.arange(groups + 1, dtype=torch.int32, device=experts.device)
    bounds = torch.searchsorted(ordered, numbers, out_int32=True)
    places = torch.empty_like(ordered)
    places[order] = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    return Routing(places.view(experts.shape), bounds.diff())


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
    if rows.is_cuda and are_plain(rows, weights) and device.triton_version():
        from sage_plugin.kernels.grouped_linear.backends.triton.combine_kernel import combine_triton

        with on_device(rows.device):
            return combine_triton(rows, weights, routing.places, dtype)
    chosen = rows[routing.places.long()].float()
    return (chosen * weights.float()[:, :, None]).sum(1).to(dtype)
