"""The form of a search space: default configs and search axes by architecture, as data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from sage_plugin.schema import LaunchConfig

Value = int | bool | str


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a launch config that is chosen together: rows, keys and warps."""

    block_m: int
    block_n: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Region:
    """Default and search axes of one class of hardware, head dim, element size and mask.

    Attributes:
        arch: glob over `DeviceFacts.arch`; `"emulation"` for the emulation.
        max_head_dim: largest head dim that the region serves.
        default: the launch config without a registry entry.
        tiles: tiles to search.
        axes: further fields to search, each with its values; the default's value is implied.
        element_bytes: largest element size of the inputs that the region serves.
        mask_kinds: kinds of masks that it serves; a dense one costs registers.
        variant: the variant whose configs these are; the emulation takes the portable one's.
    """

    arch: str
    max_head_dim: int
    default: LaunchConfig
    tiles: tuple[Tile, ...] = ()
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    element_bytes: int = 4
    mask_kinds: tuple[str, ...] = ("none", "key_bias", "dense")
    variant: str = "portable"

    def candidates(self) -> tuple[LaunchConfig, ...]:
        """The default first, then every other combination of tiles and axes, in a fixed order."""
        found = [self.default]
        names = list(self.axes)
        for tile in self.tiles:
            for values in itertools.product(*self.axes.values()):
                config = self.default.replaced(
                    block_m=tile.block_m,
                    block_n=tile.block_n,
                    num_warps=tile.num_warps,
                    **dict(zip(names, values, strict=True)),
                )
                if config not in found:
                    found.append(config)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Space:
    """The regions of one kernel, most special first."""

    regions: tuple[Region, ...]

    def region(
        self,
        arch: str,
        head_dim: int,
        element_bytes: int,
        mask_kind: str = "none",
        variant: str = "portable",
    ) -> Region | None:
        """The first region that serves such a call on an architecture, or `None`."""
        for region in self.regions:
            serves = head_dim <= region.max_head_dim and element_bytes <= region.element_bytes
            if variant != region.variant and arch != "emulation":
                continue
            if serves and mask_kind in region.mask_kinds and fnmatchcase(arch, region.arch):
                return region
        return None
