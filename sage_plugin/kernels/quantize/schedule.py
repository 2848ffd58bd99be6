"""How the work of the pre-pass is cut into programs, and in which order they start."""

from __future__ import annotations

import functools
from dataclasses import dataclass

WARP_VALUES = 2048
"""Values that a warp holds of its program's largest tile, 64 a thread."""

FEWEST_WARPS, MOST_WARPS = 4, 16

PART_VALUES = 32768
"""Values of K, and of V, that a program adds up at least."""

MOST_PART_VALUES, FEWEST_PARTS, FEWEST_OF_HEAD = 4 * PART_VALUES, 320, 24
"""Where queries do not wait for their head, parts double as long as they are no larger, as there
are as many (one round on a large GPU), and as a head has as many (a trend of its values shows in no
fewer)."""

PART_WARPS = 4
"""Warps of a program of the launch that adds up, and of the queries that follow there."""

LARGEST_GROUP, GROUP_PARTS = 96, 4
"""Parts that one program adds up; heads of more parts are added up by groups."""

WARPS_AHEAD = 3200
"""Warps that start between the parts of a head and the blocks that wait for them: one and a half
times those that a large GPU holds."""

ONE_LAUNCH_VALUES = 1 << 22
"""Values of Q, K and V up to which all work is one launch; longer calls pay a second one for keys
and values."""


@dataclass(frozen=True, slots=True)
class QuantizeSchedule:
    """How a call is cut into the programs of `prepass_kernel`, and in which order they start.

    Attributes:
        warps: warps of a program that quantises.
        q_tile: queries of a block.
        part_keys: keys of a part.
        parts: parts of the longest sequence's head.
        groups: groups of parts of a head.
        group_parts: parts of a group.
        q_blocks: blocks of the longest sequence's queries, of one head.
        k_blocks: blocks of the longest sequence's keys.
        lead: heads whose parts come before the first block.
        ahead: blocks of queries that come before those of the keys of their head.
        launches: phase of `prepass_kernel`, programs and warps of each launch.
    """

    warps: int
    q_tile: int
    part_keys: int
    parts: int
    groups: int
    group_parts: int
    q_blocks: int
    k_blocks: int
    lead: int
    ahead: int
    launches: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=1024)
def plan_of(
    heads: int,
    ratio: int,
    seq_q: int,
    seq_k: int,
    width: int,
    blocks: tuple[int, int, int],
    waits: bool = True,
) -> QuantizeSchedule:
    """The plan of a call.

    Args:
        heads: key heads of all sequences.
        ratio: query heads of a key head.
        seq_q: longest query length.
        seq_k: longest key length.
        width: channels of the quantised operands.
        blocks: `block_m`, `block_n` and `q_granule` of the launch config.
        waits: whether queries need the mean of their head's keys.
    """
    block_m, block_n, granule = blocks
    warps = max(FEWEST_WARPS, min(MOST_WARPS, max(block_n, granule) * width // WARP_VALUES))
    twice = heads * (ratio * seq_q + 2 * seq_k) * width > ONE_LAUNCH_VALUES
    first = max(PART_WARPS, granule * width // WARP_VALUES) if twice else warps
    q_tile = max(WARP_VALUES * first // width, granule)
    part_keys = PART_VALUES // width
    if twice and not waits:
        part_keys = _larger_part(part_keys, heads, seq_k, MOST_PART_VALUES // width)
    parts = max(1, -(-seq_k // part_keys))
    group_parts = parts if parts <= LARGEST_GROUP else GROUP_PARTS
    padded_q = -(-seq_q // block_m) * block_m
    q_blocks = -(-padded_q // q_tile)
    k_blocks = -(-seq_k // block_n)
    per_head = parts + ratio * q_blocks + 2 * k_blocks
    distance = WARPS_AHEAD // warps
    ahead = min(ratio * q_blocks, distance)
    lead = min(-(-(distance - ahead) // per_head), heads)
    launches: tuple[tuple[int, int, int], ...] = ((0, lead * parts + heads * per_head, warps),)
    if twice:
        lead = ahead = 0
        launches = (
            (1, heads * (parts + ratio * q_blocks), first),
            (2, 2 * heads * k_blocks, warps),
        )
    groups = -(-parts // group_parts)
    return QuantizeSchedule(
        warps, q_tile, part_keys, parts, groups, group_parts, q_blocks, k_blocks, lead, ahead,
        launches,
    )  # fmt: skip


def _larger_part(keys: int, heads: int, seq_k: int, most: int) -> int:
    """Keys of a part where few large ones are faster."""
    while 2 * keys <= most:
        parts = -(-seq_k // (2 * keys))
        if parts < FEWEST_OF_HEAD or heads * parts < FEWEST_PARTS:
            break
        keys *= 2
    return keys
