"""How the programs of a Hopper launch share its tiles, and the last of them by key blocks."""

from __future__ import annotations

from typing import NamedTuple

SMALLEST_SHARE = 4
"""Key blocks that a program walks of the last tiles at least: each share has queries to load and a
result to store."""

COST_BLOCKS, COST_BLOCKS_FULL = 2, 5
"""What shares cost, in the time of key blocks: the launch that joins them, and what a round of as
many tiles as programs has to store and to read again. Measured on an H200 with 2 to 24 heads of
1,024 to 12,288 tokens."""


class Shares(NamedTuple):
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


def single(tiles: int, blocks: int) -> Shares:
    """A program for each tile."""
    return Shares(tiles, tiles, tiles, blocks, 0)


def shared(tiles: int, blocks: int, processors: int) -> Shares:
    """A program for each of so many multiprocessors; a last round that is not full is cut.

    Example:
        >>> shared(tiles=20, blocks=100, processors=8)
        Shares(programs=8, tiles=20, whole=16, blocks=100, share=50)
        >>> shared(tiles=24, blocks=100, processors=8)
        Shares(programs=8, tiles=24, whole=24, blocks=100, share=0)
    """
    rest = tiles % processors
    share = max(-(-rest * blocks // processors), SMALLEST_SHARE)
    cost = COST_BLOCKS + COST_BLOCKS_FULL * rest / processors
    if rest and blocks - share > cost:
        return Shares(processors, tiles, tiles - rest, blocks, share)
    return Shares(min(tiles, processors), tiles, tiles, blocks, 0)
