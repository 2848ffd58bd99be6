"""The Triton kernels that sort the choices of tokens by expert, and their launch code.

First each choice draws a number among those of its expert, and so each expert counts its choices;
then the choice's row follows from the counts of the experts before. Rows of one expert have no
order among them, which no output depends on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.repeats import Repeats, repeats_of

COUNTED, PLACED = 256, 16
"""Choices of a program that counts, and of one that places: it compares each with all experts."""


@triton.jit
def _expert(experts, offs, T, E):
    """The expert of each choice, E for those that are elsewhere."""
    expert = tl.load(experts + offs, mask=offs < T, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=("T",))
def count_choices_kernel(experts, counts, ranks, T, E, SIZE: tl.constexpr):
    """Count the choices of each expert, and number each among them."""
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = offs < T
    expert = _expert(experts, offs, T, E)
    rank = tl.atomic_add(counts + expert, 1, mask=inside, sem="relaxed")
    tl.store(ranks + offs, rank, mask=inside)


@triton.jit(do_not_specialize=("T",))
def place_choices_kernel(
    experts, counts, ranks, sizes, T, E, SIZE: tl.constexpr, GROUPS: tl.constexpr
):
    """Turn the number of each choice into its row, and the counts into sizes."""
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = offs < T
    offs_e = tl.arange(0, GROUPS)
    count = tl.load(counts + offs_e, mask=offs_e < E, other=0)
    if tl.program_id(0) == 0:
        tl.store(sizes + offs_e, count, mask=offs_e < E)
    expert = _expert(experts, offs, T, E)
    before = offs_e[None, :] < expert[:, None]  # (SIZE, GROUPS)
    first = tl.sum(tl.where(before, count[None, :], 0), 1)
    rank = tl.load(ranks + offs, mask=inside, other=0)
    tl.store(ranks + offs, first + rank, mask=inside)


_repeats: Memo[Repeats] = Memo(4096)


def route_triton(experts: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each choice, and the sizes of groups; see `routing.Routing`.

    Args:
        experts: `(S, k)`.
        groups: experts that are here.
    """
    experts = experts.contiguous()
    if not experts.is_cuda:
        return _route(experts, groups)
    known = repeats_of(_repeats, (experts.shape, experts.dtype, experts.device, groups))
    places, sizes = known.repeat((experts,), experts.device, _route, experts, groups)
    assert sizes is not None
    return places, sizes


def _route(experts: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    total = experts.numel()
    counts = launch_graph.zeros(experts.device, torch.int32, groups + 1)
    places = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    sizes = torch.empty(groups, dtype=torch.int32, device=experts.device)
    launch_graph.launch(
        count_choices_kernel, -(-total // COUNTED), experts, counts, places, total, groups,
        SIZE=COUNTED, num_warps=4,  # not tuned: a few microseconds
    )  # fmt: skip
    launch_graph.launch(
        place_choices_kernel, -(-total // PLACED), experts, counts, places, sizes, total, groups,
        SIZE=PLACED, GROUPS=triton.next_power_of_2(groups), num_warps=4,  # not tuned: likewise
    )  # fmt: skip
    return places, sizes
