"""The form of a search space: default configs and search axes by architecture, as data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Generic, NamedTuple, TypeVar

from sage_plugin.schema import AnyLaunch, LaunchConfig

Value = int | bool | str
Axes = Mapping[str, tuple[Value, ...]]


Config = TypeVar("Config", bound=AnyLaunch)


class Tile(NamedTuple):
    """The part of a launch config that is chosen together: rows, keys and warps."""

    block_m: int
    block_n: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Region(Generic[Config]):
    """Default and search axes of one class of hardware and of calls.

    Attributes:
        arch: glob over `DeviceFacts.arch`; `"emulation"` for the emulation.
        most: largest head dim, or most rows of a linear, that the region serves.
        default: the launch config without a registry entry.
        tiles: tiles to search, each the values of the same few fields.
        axes: further fields to search, each with its values; the default's value is implied.
        element_bytes: largest element size of the inputs, or of paged caches, that it serves.
        mask_kinds: kinds of masks that it serves; a dense one costs registers.
        variant: the variant whose configs these are; the emulation takes the portable one's.
        kinds: kinds of paged calls that it serves, none for all.
    """

    arch: str
    most: int
    default: Config
    tiles: tuple[tuple[int, ...], ...] = ()
    axes: Axes = field(default_factory=dict)
    element_bytes: int = 4
    mask_kinds: tuple[str, ...] = ("none", "key_bias", "dense")
    variant: str = "portable"
    kinds: tuple[str, ...] = ()

    def serves(
        self, arch: str, size: int, element_bytes: int = 0, mask_kind: str = "none", kind: str = ""
    ) -> bool:
        """Return whether the region serves such a call on an architecture."""
        return (
            size <= self.most
            and element_bytes <= self.element_bytes
            and mask_kind in self.mask_kinds
            and kind in (self.kinds or (kind,))
            and fnmatchcase(arch, self.arch)
        )

    def candidates(
        self, recipe: Axes | None = None, tile: Sequence[str] = Tile._fields
    ) -> tuple[Config, ...]:
        """The default first, then every other combination of tiles and axes, in a fixed order.

        Args:
            recipe: further axes, of fields that change errors; the default's value is added.
            tile: the fields that tiles are values of.
        """
        found = dict.fromkeys([self.default])
        axes = dict(self.axes)
        for name, values in (recipe or {}).items():
            axes[name] = tuple(dict.fromkeys((getattr(self.default, name), *values)))
        for one in self.tiles:
            first = {name: values[0] for name, values in axes.items()}
            # Which checks the names.
            own: Config = self.default.replaced(**dict(zip(tile, one, strict=True)), **first)  # type: ignore[assignment]
            for combination in itertools.product(*axes.values()):
                changes: dict[str, Any] = dict(zip(axes, combination, strict=True))
                found[dataclasses.replace(own, **changes)] = None
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Space:
    """The regions of one kernel, most special first.

    Attributes:
        regions: what is served, and how it is launched.
        recipes: axes by variant that change what is computed, with errors of their own: smoothing,
            rotation, granules, flush, exponent form. They are searched in every region.
    """

    regions: tuple[Region[LaunchConfig], ...]
    recipes: Mapping[str, Axes] = field(default_factory=dict)

    def region(
        self,
        arch: str,
        head_dim: int,
        element_bytes: int,
        mask_kind: str = "none",
        variant: str = "portable",
    ) -> Region[LaunchConfig] | None:
        """The first region that serves such a call on an architecture, or `None`."""
        for region in self.regions:
            own = arch == "emulation" or variant == region.variant
            if own and region.serves(arch, head_dim, element_bytes, mask_kind):
                return region
        return None
