"""What one card measured, for another with the same chip."""

from __future__ import annotations

import dataclasses

from sage_plugin.errors import ConfigError
from sage_plugin.schema import AnyEntry, DeviceFacts, RegistryFile

CHIP = ("kind", "arch", "sm_count", "smem_bytes", "fp8_dtype")
"""Facts that two cards share whose kernels take the same time but for memory and clocks."""


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
