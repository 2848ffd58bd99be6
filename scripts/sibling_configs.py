"""Writes the configs that one card measured for a sibling with the same chip, marked as such.

    python scripts/sibling_configs.py configs/nvidia-h200/linear.json nvidia-h100-80gb-hbm3 configs

Entries that the sibling measured itself stay. Its facts are those of a file that it has already.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sage_plugin.errors import ConfigError
from sage_plugin.registry import load
from sage_plugin.registry.cards import recorded
from sage_plugin.registry.merge import merge

CHIP = ("kind", "arch", "sm_count", "smem_bytes", "fp8_dtype")
"""Facts that siblings share."""


def write(source: Path, slug: str, into: Path) -> Path:
    """Merge a file's entries into the sibling's, and return that.

    Raises:
        ConfigError: the cards differ in more than their name and memory.
    """
    file, facts = load.read(source), recorded(slug)
    if other := [f for f in CHIP if getattr(facts, f) != getattr(file.device, f)]:
        raise ConfigError(f"{slug} is no sibling of {file.device.slug}: {', '.join(other)} differ")
    path = load.file_path(into, slug, file.family)
    own = {e.key for e in load.read(path).entries if not e.evidence.measured_on} if path.exists() \
        else set()  # fmt: skip
    marked = [
        replace(entry, evidence=replace(entry.evidence, measured_on=file.device.name))
        for entry in file.entries
        if entry.key not in own
    ]
    merge(path, marked, family=file.family, facts=facts, toolchain=file.toolchain)
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="file of the card that was measured")
    parser.add_argument("slug", help="the sibling, such as nvidia-h100-80gb-hbm3")
    parser.add_argument("into", type=Path, help="folder that holds <card>/<family>.json")
    args = parser.parse_args(argv)
    print(write(args.source, args.slug, args.into))


if __name__ == "__main__":
    main()
