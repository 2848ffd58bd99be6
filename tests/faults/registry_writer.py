"""One of several processes that write to one registry file; it loads no torch."""

from __future__ import annotations

from pathlib import Path

from tests.registry import samples


def write(path: Path, start: int, count: int) -> None:
    """Merge entries whose lengths begin at a number, one by one."""
    for number in range(start, start + count):
        entry = samples.entry(samples.key(seq_q=64 + number, seq_k=64), samples.config())
        samples.merged(path, entry)
