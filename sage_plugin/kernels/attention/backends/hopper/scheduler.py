"""How the programs of a Hopper launch split its tiles: the last ones by key blocks (Stream-K)."""

from __future__ import annotations

from typing import NamedTuple

SMALLEST_SHARE = 4
"""Key blocks that a program walks of the last tiles at least: each share has queries to load and a
result to store."""

COST_BLOCKS, COST_BLOCKS_FULL = 2, 5
"""What shares cost, in the time of key blocks: the launch that joins them, and what a round of as
many tiles as programs has to store and to read again. Measured on an H200 with 2 to 24 heads of
1,024 to 12,288 tokens."""


class StreamKSplit(NamedTuple):
    """Who walks what in a launch of the Hopper kernel.

    Attributes:
        programs: size of the grid.
        tiles: tiles of queries, of all heads.
        whole: tiles that a program walks whole, the first ones.
        blocks: key blocks of a tile.
        share: key blocks that a program walks of the other tiles; 0 where there are none.
    """

    programs: int
    tiles: int
    whole: int
    blocks: int
    share: int

    @property
    def cut(self) -> int:
        """Tiles that are walked in pieces."""
        return self.tiles - self.whole

    @property
    def pieces(self) -> int:
        """Numbers that pieces have: each is a program's plus that of a cut tile."""
        return self.programs + self.cut


def tile_each(tiles: int, blocks: int) -> StreamKSplit:
    """A program for each tile."""
    return StreamKSplit(tiles, tiles, tiles, blocks, 0)


def stream_k(tiles: int, blocks: int, processors: int) -> StreamKSplit:
    """A program for each of so many multiprocessors; a last round that is not full is cut.

    Example:
        >>> stream_k(tiles=20, blocks=100, processors=8)
        StreamKSplit(programs=8, tiles=20, whole=16, blocks=100, share=50)
        >>> stream_k(tiles=24, blocks=100, processors=8)
        StreamKSplit(programs=8, tiles=24, whole=24, blocks=100, share=0)
    """
    rest = tiles % processors
    share = max(-(-rest * blocks // processors), SMALLEST_SHARE)
    cost = COST_BLOCKS + COST_BLOCKS_FULL * rest / processors
    if rest and blocks - share > cost:
        return StreamKSplit(processors, tiles, tiles - rest, blocks, share)
    return StreamKSplit(min(tiles, processors), tiles, tiles, blocks, 0)
