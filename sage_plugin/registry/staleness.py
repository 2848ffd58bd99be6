"""In what the software that a config was tuned with differs from another, as far as times go."""

from __future__ import annotations

import re

from sage_plugin.schema import NO_SPEEDS, AnyEntry, Toolchain

COMPILERS = ("torch", "triton")
"""Packages that build or launch kernels; a patch release of one changes neither."""


def changes(entry: AnyEntry, here: Toolchain) -> tuple[str, ...]:
    """Name what changed since an entry was tuned, so that another config may be the fastest now.

    What is not known of either side, such as the kernels' hash in entries of earlier releases, is
    no change; nor is anything to a variant whose times mean nothing.
    """
    measured = entry.evidence.toolchain
    if entry.key.variant in NO_SPEEDS:
        return ()
    pairs = {name: (getattr(measured, name), getattr(here, name)) for name in COMPILERS}
    found = [
        f"{name} {_release(then)} then, {_release(now)} now"
        for name, (then, now) in pairs.items()
        if then and now and _release(then) != _release(now)
    ]
    if measured.kernels and here.kernels and measured.kernels != here.kernels:
        found.append("the kernels were edited since")
    return tuple(found)


def _release(version: str) -> str:
    """Major and minor number of a version, the whole text where it has none."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version
