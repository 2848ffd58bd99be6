"""The form of a search space: default configs and search axes by architecture, as data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from sage_plugin.schema import AnyLaunch, LaunchConfig

Value = int | bool | str
Axes = Mapping[str, tuple[Value, ...]]


TILE = ("block_m", "block_n", "num_warps")
"""What a tile of attention is."""

Config = TypeVar("Config", bound=AnyLaunch)


def combinations(
    default: Config, names: Sequence[str], tiles: Iterable[Sequence[int]], axes: Axes
) -> dict[Config, None]:
    """Return the default first, then every other combination of tiles and axes, in a fixed order.

    Args:
        default: the default launch config.
        names: fields of a tile.
        tiles: their values.
        axes: further fields, each with its values.
    """
    found = dict.fromkeys([default])
    for tile in tiles:
        first = {name: values[0] for name, values in axes.items()}
        # Which checks the names.
        own: Config = default.replaced(**dict(zip(names, tile, strict=True)), **first)  # type: ignore[assignment]
        for combination in itertools.product(*axes.values()):
            changes: dict[str, Any] = dict(zip(axes, combination, strict=True))
            found[dataclasses.replace(own, **changes)] = None
    return found


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
    axes: Axes = field(default_factory=dict)
    element_bytes: int = 4
    mask_kinds: tuple[str, ...] = ("none", "key_bias", "dense")
    variant: str = "portable"

    def candidates(self, recipe: Axes | None = None) -> tuple[LaunchConfig, ...]:
        """The default first, then every other combination of tiles and axes, in a fixed order.

        Args:
            recipe: further axes, of fields that change errors; the default's value is added.
        """
        axes = dict(self.axes)
        for name, values in (recipe or {}).items():
            axes[name] = tuple(dict.fromkeys((getattr(self.default, name), *values)))
        return tuple(combinations(self.default, TILE, map(dataclasses.astuple, self.tiles), axes))


@dataclass(frozen=True, slots=True)
class Space:
    """The regions of one kernel, most special first.

    Attributes:
        regions: what is served, and how it is launched.
        recipes: axes by variant that change what is computed, with errors of their own: smoothing,
            rotation, granules, flush, exponent form. They are searched in every region.
    """

    regions: tuple[Region, ...]
    recipes: Mapping[str, Axes] = field(default_factory=dict)

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
