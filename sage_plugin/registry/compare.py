"""In what two sets of tuned configs differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sage_plugin.schema import AnyEntry, AnyKey, RegistryFile


@dataclass(frozen=True, slots=True)
class EntryPair:
    """The entries of one card and call on both sides, `None` where a side has none."""

    slug: str
    key: AnyKey
    first: AnyEntry | None
    second: AnyEntry | None

    @property
    def same_config(self) -> bool:
        """Whether both sides have the call, with one config."""
        return (
            self.first is not None
            and self.second is not None
            and (self.first.config == self.second.config)
        )


def differences(
    first: Iterable[RegistryFile], second: Iterable[RegistryFile]
) -> tuple[EntryPair, ...]:
    """Pair the entries of two sets of files by card and call, without those that are equal."""
    sides = [
        {(file.device.slug, entry.key): entry for file in files for entry in file.entries}
        for files in (first, second)
    ]
    places = sorted(
        sides[0].keys() | sides[1].keys(),
        key=lambda place: (place[0], place[1].discrete(), place[1].numbers()),
    )
    pairs = (EntryPair(*place, *(side.get(place) for side in sides)) for place in places)
    return tuple(pair for pair in pairs if pair.first != pair.second)
