"""Launch configs of linears: defaults, what a search tries, and what is legal on a device."""

from __future__ import annotations

from collections.abc import Sequence

from sage_plugin.errors import ConfigError
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.kernels.legality import LOADS, POWERS, first_wrong, hardware_checks, one_of
from sage_plugin.kernels.linear.search_space import REGIONS, TILE
from sage_plugin.kernels.search_space import Region
from sage_plugin.schema import DeviceFacts, LinearKey, LinearLaunch

DESCRIBED_BYTES = 16
"""Rows that a descriptor describes begin at multiples of it."""

LARGEST_TILE = 128 * 256
"""Sums of a tile that eight warps hold in registers."""


def default_launch(key: LinearKey, facts: DeviceFacts) -> LinearLaunch:
    """Return the architecture default of a call.

    Raises:
        ConfigError: no kernel runs on this hardware.
    """
    return _runnable(region_of(REGIONS, key.rows, facts).default, key)


def search_space(key: LinearKey, facts: DeviceFacts) -> tuple[LinearLaunch, ...]:
    """Return the launch configs to search, legal or not, the default first."""
    return configs_of(region_of(REGIONS, key.rows, facts), key)


def configs_of(region: Region[LinearLaunch], key: LinearKey) -> tuple[LinearLaunch, ...]:
    """Return the launch configs of a region for a call, its default first."""
    found = region.candidates(tile=TILE)
    return tuple(dict.fromkeys(_runnable(config, key) for config in found))


def _runnable(config: LinearLaunch, key: LinearKey) -> LinearLaunch:
    """Return a config for a call whose rows no descriptor may describe, too."""
    if config.loads == "descriptor" and _row_bytes(key) % DESCRIBED_BYTES:
        return config.replaced(loads="pointer")
    return config


def _row_bytes(key: LinearKey) -> int:
    return key.in_features * element_bytes(key)


def element_bytes(key: LinearKey) -> int:
    """Return the bytes of a number that a call multiplies."""
    return 2 if key.kernel == "bf16" else 1


def illegal_reason(config: LinearLaunch, key: LinearKey, facts: DeviceFacts) -> str | None:
    """Return why a launch config cannot run a call on a device, in one sentence, or `None`."""
    checks = (
        *one_of(
            config, block_m=POWERS, block_n=POWERS[1:], block_k=POWERS[1:], num_warps=(1, 2, 4, 8),
            num_stages=range(1, 9), programs=range(9), group_m=range(1, 65), loads=LOADS,
        ),
        (config.block_m * config.block_n <= LARGEST_TILE * config.num_warps // 8,
         f"a tile of {config.block_m} x {config.block_n} does not fit into the registers of "
         f"{config.num_warps} warps"),
        *hardware_checks(config, facts),
        (config.loads != "descriptor" or _row_bytes(key) % DESCRIBED_BYTES == 0,
         f"loads 'descriptor' needs rows of whole 16 bytes, and in_features is {key.in_features}"),
    )  # fmt: skip
    return first_wrong(checks, smem_lower_bound(config) * element_bytes(key), facts)


def smem_lower_bound(config: LinearLaunch) -> int:
    """Return the bytes of shared memory that a launch of 8 bits needs at least, for its blocks."""
    return (config.num_stages - 1) * (config.block_m + config.block_n) * config.block_k


def tune_command(key: LinearKey) -> str:
    """Return the `sage tune` command that would fill a miss."""
    return (
        f"sage tune --op linear --kernel {key.kernel}:{key.variant} --dtype {key.dtype} "
        f"--out-in-features {key.out_features}/{key.in_features} --batch-sizes {key.rows}"
    )


def _words(key: LinearKey) -> tuple[str, ...]:
    return f"{key.out_features} x {key.in_features} features", f"{key.rows} rows", key.dtype


RULES = LaunchRules(
    LinearLaunch,
    default_launch,
    search_space,
    illegal_reason,
    tune_command,
    _words,
    "backend='emulation'",
    counted=True,
)
find_launch = RULES.find


def region_of(
    regions: Sequence[Region[LinearLaunch]], rows: int, facts: DeviceFacts
) -> Region[LinearLaunch]:
    """Return the first region that serves so many rows on a device.

    Raises:
        ConfigError: there is none.
    """
    arch = "emulation" if facts.kind == "cpu" else facts.arch
    for region in regions:
        if region.serves(arch, rows):
            return region
    raise ConfigError(f"linears have no launch config for {arch}; use kernel='bf16'")
