"""What keys of calls are made of, in any op family."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar


class NumbersOfKey:
    """Say in which numbers a near match may differ, and which of them its entry has ranges of."""

    __slots__ = ()
    NUMBERS: ClassVar[tuple[str, ...]]
    LENGTHS: ClassVar[tuple[str, ...]]

    def discrete(self) -> tuple[Any, ...]:
        """The fields that must be equal for a config to be shared."""
        names = (one.name for one in fields(self))  # type: ignore[arg-type]
        return tuple(getattr(self, name) for name in names if name not in self.NUMBERS)

    def numbers(self) -> tuple[int, ...]:
        """The fields in which a near match may differ."""
        return tuple(getattr(self, name) for name in self.NUMBERS)
