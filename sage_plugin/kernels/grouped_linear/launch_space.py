"""Launch configs of grouped products: defaults, what a search tries, and what is legal."""

from __future__ import annotations

from sage_plugin.kernels.grouped_linear.search_space import REGIONS, SOME, WIDER
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.kernels.linear.launch_space import (
    configs_of,
    element_bytes,
    illegal_reason,
    region_of,
)
from sage_plugin.kernels.search_space import Region
from sage_plugin.schema import DeviceFacts, LinearKey, LinearLaunch

__all__ = ["default_launch", "find_launch", "illegal_reason", "search_space", "tune_command"]


def default_launch(key: LinearKey, facts: DeviceFacts) -> LinearLaunch:
    """Return the architecture default of a call.

    Raises:
        ConfigError: no kernel runs on this hardware.
    """
    return search_space(key, facts)[0]


def search_space(key: LinearKey, facts: DeviceFacts) -> tuple[LinearLaunch, ...]:
    """Return the launch configs to search, legal or not, the default first."""
    found = configs_of(_region(key, facts), key)
    if element_bytes(key) == 1:
        return found
    # As many bytes of a row are read at a step, of twice the size each.
    return tuple(dict.fromkeys(c.replaced(block_k=max(32, c.block_k // 2)) for c in found))


def tune_command(key: LinearKey) -> str:
    """Return the `sage tune` command that would fill a miss."""
    return (
        f"sage tune --op grouped_linear --kernel {key.kernel}:{key.variant} --dtype {key.dtype} "
        f"--out-in-features {key.out_features}/{key.in_features} --groups {key.groups} "
        f"--batch-sizes {key.rows}"
    )


def _words(key: LinearKey) -> tuple[str, ...]:
    sizes = f"{key.groups} x {key.out_features} x {key.in_features} features"
    return sizes, f"{key.rows} rows", key.dtype


RULES = LaunchRules(
    LinearLaunch,
    default_launch,
    search_space,
    illegal_reason,
    tune_command,
    _words,
    "backend='emulation'",
)
find_launch = RULES.find


def _region(key: LinearKey, facts: DeviceFacts) -> Region[LinearLaunch]:
    """The region of a call: how its rows are spread is known on the device alone."""
    rows = -(-key.rows // max(1, key.groups))
    wide = element_bytes(key) == 2 and rows > SOME
    return region_of((*WIDER, *REGIONS) if wide else REGIONS, rows, facts)
