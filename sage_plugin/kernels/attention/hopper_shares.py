"""How the programs of a Hopper launch share its tiles, and the last of them by key blocks."""

from __future__ import annotations

from typing import NamedTuple

SMALLEST_SHARE = 4
"""Key blocks that a program of the last round walks at least: each share has a tile to load and a
result to store."""

SAVED_BLOCKS = 8
"""Key blocks by which shares shorten the last round at least: a second launch joins what they
leave, and takes the time of about five."""


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
    if rest and blocks - share >= SAVED_BLOCKS:
        return Shares(processors, tiles, tiles - rest, blocks, share)
    return Shares(min(tiles, processors), tiles, tiles, blocks, 0)
