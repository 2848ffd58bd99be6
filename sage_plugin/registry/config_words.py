"""How a launch config reads: its tile, warps and stages, and what differs from another config."""

from __future__ import annotations

import dataclasses
import textwrap

from sage_plugin.schema import AnyLaunch

BLOCKS = ("block_m", "block_n", "block_k")
TILE = (*BLOCKS, "num_warps", "num_stages")
OFF = {"loads": "pointer", "smooth_k": False, "smooth_v": False, "pv_flush": 0, "q_granule": 1}
"""Values that stand for nothing special, of the fields whose zero does not."""
WIDTH = 24
"""Of a column of configs."""


def config_text(config: AnyLaunch, default: AnyLaunch | None = None) -> str:
    """Write a launch config on one line: tile, warps, stages, then each field that differs.

    Example:
        >>> from sage_plugin.schema import LaunchConfig
        >>> one = LaunchConfig(128, 64, 4, 3, "descriptor", True, False, 8, overlap=True)
        >>> config_text(one)
        '128x64 w4 s3 tma smooth_k pv_flush 8 overlap'
        >>> config_text(one, one.replaced(pv_flush=0, smooth_v=True))
        '128x64 w4 s3 no smooth_v pv_flush 8'
    """
    return " ".join((_tile(config), *_differences(config, default)))


def config_lines(config: AnyLaunch, default: AnyLaunch | None = None) -> str:
    """Write what `config_text` does on a few lines, for narrow columns."""
    # A field and its value stay on one line.
    parts = " ".join(part.replace(" ", "\0") for part in _differences(config, default))
    rest = textwrap.wrap(parts, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join((_tile(config), *(line.replace("\0", " ") for line in rest)))


def _tile(config: AnyLaunch) -> str:
    blocks = "x".join(f"{getattr(config, name)}" for name in BLOCKS if hasattr(config, name))
    return f"{blocks} w{config.num_warps} s{config.num_stages}"


def _differences(config: AnyLaunch, default: AnyLaunch | None) -> list[str]:
    found = []
    for field in dataclasses.fields(config):
        if field.name in TILE:
            continue
        value = getattr(config, field.name)
        off = OFF.get(field.name, 0 if field.default is dataclasses.MISSING else field.default)
        usual = off if default is None else getattr(default, field.name)
        if value != usual:
            found.append(_words(field.name, value))
    return found


def _words(name: str, value: object) -> str:
    if name == "loads":
        return "tma" if value == "descriptor" else str(value)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"
