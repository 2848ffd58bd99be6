"""What is wrong with registry files, in sentences: the errors that the runtime only warns of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sage_plugin.errors import ConfigError, number_of
from sage_plugin.paged_records import (
    PAGED_ATTENTION,
    PAGED_BACKENDS,
    PAGED_KERNELS,
    PagedKey,
)
from sage_plugin.registry import load
from sage_plugin.schema import (
    ATTENTION,
    GROUPED_LINEAR,
    GROUPED_LINEAR_KERNELS,
    KERNELS,
    LINEAR,
    LINEAR_BACKENDS,
    LINEAR_KERNELS,
    VARIANTS,
    AnyEntry,
    AnyKey,
    DeviceFacts,
    LinearKey,
    RegistryFile,
)

IllegalReason = Callable[[Any, Any, DeviceFacts], str | None]
NAMES = {
    ATTENTION: (KERNELS, VARIANTS),
    LINEAR: (LINEAR_KERNELS, LINEAR_BACKENDS),
    GROUPED_LINEAR: (GROUPED_LINEAR_KERNELS, LINEAR_BACKENDS),
    PAGED_ATTENTION: (PAGED_KERNELS, PAGED_BACKENDS),
}
"""Kernels and variants of each family."""


def problems(
    path: str | Path, facts: DeviceFacts | None = None, *, illegal: IllegalReason | None = None
) -> list[str]:
    """List everything that is wrong with one registry file."""
    path = Path(path)
    try:
        file = load.read(path)
    except ConfigError as error:
        return [str(error)]
    found = _header_problems(file, path, facts)
    for number, entry in enumerate(file.entries, start=1):
        reasons = _entry_reasons(entry, file, illegal)
        found += [f"entry {number} ({_short(entry.key)}): {reason}" for reason in reasons]
    return [f"{path}: {sentence}" for sentence in found]


def registry_files(path: str | Path) -> list[Path]:
    """List the registry files of a folder (`<device_slug>/<family>.json`), or a file itself."""
    path = Path(path)
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: no such file or folder")
    found = sorted({*path.glob("*.json"), *load.files_under(path)})
    if not found:
        raise ConfigError(f"{path}: no <device_slug>/<family>.json inside")
    return found


def _header_problems(file: RegistryFile, path: Path, facts: DeviceFacts | None) -> list[str]:
    # `device` loads torch, which reading and merging files does not need.
    from sage_plugin.device import slug

    found = []
    where = path.resolve()
    unreachable = f"{number_of(len(file.entries), 'entry', 'entries')} unreachable"
    if slug(file.device.name) != file.device.slug:
        found.append(
            f"{unreachable}: a device named {file.device.name!r} looks for "
            f"{slug(file.device.name)!r}, the file says {file.device.slug!r}"
        )
    if where.parent.name != file.device.slug:
        found.append(
            f"{unreachable}: the folder is {where.parent.name!r}, expected {file.device.slug!r}"
        )
    if where.stem != file.family:
        found.append(f"{unreachable}: the file holds {file.family!r}, expected {where.stem!r}")
    if facts is not None and facts.slug == file.device.slug and facts.kind != "cpu":
        for name in ("kind", "arch", "sm_count", "smem_bytes"):
            there, here = getattr(file.device, name), getattr(facts, name)
            if there != here:
                found.append(f"{unreachable}: {name} is {there} there, {here} on this device")
    return found


def _entry_reasons(entry: AnyEntry, file: RegistryFile, illegal: IllegalReason | None) -> list[str]:
    key, reasons = entry.key, []
    kernels, variants = NAMES[key.family]
    if key.kernel not in kernels:
        return [f"unreachable, unknown kernel {key.kernel!r}; known: {', '.join(kernels)}"]
    if key.variant not in variants:
        return [f"unreachable, unknown variant {key.variant!r}; known: {', '.join(variants)}"]
    evidence = entry.evidence
    if not evidence.inputs:
        reasons.append("its evidence names no inputs")
    if not evidence.confirmed and evidence.gain_low <= 0:
        reasons.append(f"its evidence shows no gain (lower bound {evidence.gain_low:.2%})")
    if evidence.errors.bad_values:
        reasons.append(f"its output held {evidence.errors.bad_values} NaN or infinite values")
    if illegal and (reason := illegal(entry.config, key, file.device)):
        reasons.append(f"config is illegal: {reason}")
    return reasons


def _short(key: AnyKey) -> str:
    if isinstance(key, LinearKey):
        sizes = f"{key.rows}x{key.in_features}->{key.out_features}"
        groups = f" of {key.groups} groups" if key.groups else ""
        return f"{key.kernel}:{key.variant} {sizes}{groups} {key.dtype}"
    if isinstance(key, PagedKey):
        sizes = f"{key.kind} {key.tokens}x{key.max_keys} head_dim {key.head_dim}"
        return f"{key.kernel}:{key.variant} {sizes} {key.dtype} on {key.cache_dtype}"
    return (
        f"{key.kernel}:{key.variant} seq {key.seq_q}x{key.seq_k} head_dim {key.head_dim} "
        f"{key.dtype}{' causal' if key.causal else ''} {key.layout}"
    )
