"""Cards that are not here: what files recorded of them, and what a sibling measured for them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path

from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.registry import load
from sage_plugin.schema import AnyEntry, DeviceFacts, RegistryFile

CHIP = ("kind", "arch", "sm_count", "smem_bytes", "fp8_dtype")
"""Facts that two cards share whose kernels take the same time but for memory and clocks."""


def recorded(slug: str, config_dir: str | Path | None = None) -> DeviceFacts:
    """Return the facts of a card as the first of the user's and shipped files recorded them.

    Args:
        slug: name of its folder of configs, such as `nvidia-h200`, or a beginning that no other
            card has, such as `nvidia-h100`.
        config_dir: folder to ask first.

    Raises:
        UsageError: no readable file is of such a card; the message lists those that are.

    Example:
        >>> recorded("nvidia-h200").arch
        'sm_90'
    """
    known = dict(_cards(config_dir))
    longer = [name for name in known if name.startswith(f"{slug}-")]
    if slug in known or len(longer) == 1:
        return known[slug if slug in known else longer[0]]
    close = difflib.get_close_matches(slug, known, n=1)
    meant = f"did you mean {close[0]!r}? Cards" if close else "cards"
    raise UsageError(
        f"--as {slug!r}: {meant} with configs are {', '.join(sorted(known)) or 'none'}"
    )


def _cards(config_dir: str | Path | None) -> Iterator[tuple[str, DeviceFacts]]:
    """Cards by slug, those of the first place last, so that they stand."""
    for _, path in reversed(load.search_path("any", config_dir=config_dir)):
        for file in load.files_under(path.parents[1]):
            try:
                facts = load.read(file).device
            except ConfigError:
                continue  # `sage configs check` says what is wrong with it
            if facts.slug == file.parent.name:
                yield facts.slug, facts


def for_sibling(file: RegistryFile, sibling: DeviceFacts) -> RegistryFile:
    """Return a file of a sibling's, each entry of which names the card that was measured.

    Raises:
        ConfigError: the chips differ.
    """
    for name in CHIP:
        own, other = getattr(file.device, name), getattr(sibling, name)
        if own != other:
            raise ConfigError(
                f"{file.device.name} and {sibling.name} are no siblings: {name} is {own} and "
                f"{other}; tune on the card itself"
            )
    entries = tuple(_of_sibling(entry, file.device.name) for entry in file.entries)
    return dataclasses.replace(file, device=sibling, entries=entries)


def _of_sibling(entry: AnyEntry, measured_on: str) -> AnyEntry:
    name = entry.evidence.measured_on or measured_on
    evidence = dataclasses.replace(entry.evidence, measured_on=name)
    return dataclasses.replace(entry, evidence=evidence)
