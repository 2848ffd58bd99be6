"""Stand-ins that tests of several programs share."""

from __future__ import annotations

from collections.abc import Iterable

from sage_plugin.measure.timing import Samples


def half_milliseconds(calls: Iterable[str], *, method: str, **_: object) -> dict[str, Samples]:
    """The first call takes half a millisecond, and each other half of one more."""
    return {
        name: Samples(name=name, ms=(0.5 * (at + 1),) * 3, method=method)
        for at, name in enumerate(calls)
    }
