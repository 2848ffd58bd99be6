"""Launch code of grouped products: a plan, made on the device, and one launch that follows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.kernels import launch_graph
from sage_plugin.kernels.grouped_linear.backends.triton.grouped_kernel import (
    GroupedTensors,
    grouped_product_kernel,
)
from sage_plugin.kernels.grouped_linear.backends.triton.schedule_kernel import (
    FIELDS,
    schedule_groups_kernel,
)
from sage_plugin.kernels.grouped_linear.operands import GroupedOperands
from sage_plugin.kernels.launch_config import Memo, compiler_options
from sage_plugin.kernels.linear.backends.triton.products import products_of
from sage_plugin.kernels.repeats import Repeats, repeats_of
from sage_plugin.schema import LinearLaunch

PLANNED = 4096
"""Comparisons of blocks with groups of a program that plans: 32 a thread."""

ZEROERS, ZERO_ROWS, ZERO_WIDTH = 64, 4, 1024
"""Programs that zero rows without a group, rows of each step, and columns of it."""


@dataclass(frozen=True)
class ScheduleConfig:
    """What the plan is compiled for.

    Attributes:
        GROUPS: a power of two of groups.
        BLOCKS: blocks of a program that plans.
        BLOCK_M: rows of a block.
        ZERO_ROWS: rows that are zeroed at once; ZERO_WIDTH columns.
    """

    GROUPS: int
    BLOCKS: int
    BLOCK_M: int
    ZERO_ROWS: int
    ZERO_WIDTH: int


_repeats: Memo[Repeats] = Memo(4096)


def multiply_groups_triton(
    operands: GroupedOperands, out_dtype: torch.dtype, launch: LinearLaunch
) -> torch.Tensor:
    """Multiply rows with the weight of their group, without a look at the group sizes.

    Args:
        operands: the tensors.
        out_dtype: dtype of the output.
        launch: the launch config.

    Returns:
        `(T, N)`, rows beyond the last group 0.
    """
    x, x_scale, weights, w_scale, group_sizes, bias = operands
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    tensors = (x, x_scale, weights, w_scale, group_sizes.contiguous(), bias)
    if not x.is_cuda:
        return _multiply(*tensors, out_dtype, launch)[0]
    key = (
        x.shape, x.dtype, x.device, weights.shape, x_scale is None,
        None if bias is None else bias.dtype, out_dtype, launch,
    )  # fmt: skip
    known = repeats_of(_repeats, key)
    return known.repeat(tensors, x.device, _multiply, *tensors, out_dtype, launch)[0]


def _multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weights: torch.Tensor,
    w_scale: torch.Tensor | None,
    group_sizes: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    launch: LinearLaunch,
) -> tuple[torch.Tensor, None]:
    rows, channels = x.shape
    groups, columns, _ = weights.shape
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    capacity = _most_blocks(rows, groups, launch.block_m)
    table = launch_graph.empty(x.device, torch.int32, 1 + FIELDS * capacity)
    _schedule(group_sizes, table, out, capacity, launch)
    tiles = capacity * -(-columns // launch.block_n)
    config, programs, *given = products_of(
        x, weights, tiles, launch, SCALED=x_scale is not None,
        BIAS=bias is not None,
    )  # fmt: skip
    launch_graph.launch(
        grouped_product_kernel, programs, *given,
        GroupedTensors(out, x_scale, w_scale, bias, table), rows, columns, channels, capacity,
        programs, CONFIG=config, **compiler_options(launch),
    )  # fmt: skip
    return out, None


def _most_blocks(rows: int, groups: int, block_m: int) -> int:
    """Blocks of rows at most, however the rows are spread: each group may end in a part of one."""
    return min(rows, rows // block_m + groups)


def _schedule(
    group_sizes: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    capacity: int,
    launch: LinearLaunch,
) -> None:
    rows, columns = out.shape
    groups = group_sizes.shape[0]
    padded = max(16, 1 << (groups - 1).bit_length())
    blocks = max(1, PLANNED // padded)
    planners, zeroers = -(-capacity // blocks), min(ZEROERS, -(-rows // ZERO_ROWS))
    config = ScheduleConfig(
        GROUPS=padded, BLOCKS=blocks, BLOCK_M=launch.block_m, ZERO_ROWS=ZERO_ROWS,
        ZERO_WIDTH=ZERO_WIDTH,
    )  # fmt: skip
    launch_graph.launch(
        schedule_groups_kernel, planners + zeroers, group_sizes, table, out, rows, columns, groups,
        capacity, planners, zeroers, CONFIG=config, num_warps=4,  # not tuned: a few microseconds
    )  # fmt: skip
