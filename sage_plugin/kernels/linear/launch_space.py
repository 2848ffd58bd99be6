"""Launch configs of linears: defaults, what a search tries, and what is legal on a device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase

from sage_plugin.errors import ConfigError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.contract import ResolvedConfig
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.kernels.linear.search_space import REGIONS, LinearRegion
from sage_plugin.kernels.support import TMA_ARCHS
from sage_plugin.schema import LINEAR, DeviceFacts, LinearKey, LinearLaunch

BLOCKS_M, BLOCKS_N, BLOCKS_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128, 256)
DESCRIBED_BYTES = 16
"""Rows that a descriptor describes begin at multiples of it."""

LARGEST_TILE = 128 * 256
"""Sums of a tile that eight warps hold in registers."""


def find_launch(
    key: LinearKey, facts: DeviceFacts, *, config_dir: str | None = None
) -> ResolvedConfig:
    """Return the launch config of our product of a call, see `kernels.launch_config.find`.

    Raises:
        ConfigError: `SAGE_PLUGIN_LINEAR_LAUNCH` is not a JSON object of launch config fields.
    """
    return launch_config.find(key, facts, RULES, config_dir=config_dir)


def default_launch(key: LinearKey, facts: DeviceFacts) -> LinearLaunch:
    """Return the architecture default of a call.

    Raises:
        ConfigError: no kernel runs on this hardware.
    """
    return _runnable(region_of(REGIONS, key.rows, facts).default, key)


def search_space(key: LinearKey, facts: DeviceFacts) -> tuple[LinearLaunch, ...]:
    """Return the launch configs to search, legal or not, the default first."""
    return configs_of(region_of(REGIONS, key.rows, facts), key)


def configs_of(region: LinearRegion, key: LinearKey) -> tuple[LinearLaunch, ...]:
    """Return the launch configs of a region for a call, its default first."""
    found = [region.default]
    for (m, n, k, warps), values in itertools.product(
        region.tiles, itertools.product(*region.axes.values())
    ):
        config = region.default.replaced(
            block_m=m, block_n=n, block_k=k, num_warps=warps,
            **dict(zip(region.axes, values, strict=True)),
        )  # fmt: skip
        found.append(config)
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
    tma = config.loads == "descriptor"
    checks = (
        *(
            (value in allowed, f"{name} {value} is not one of {', '.join(map(str, allowed))}")
            for name, value, allowed in (
                ("block_m", config.block_m, BLOCKS_M),
                ("block_n", config.block_n, BLOCKS_N),
                ("block_k", config.block_k, BLOCKS_K),
                ("num_warps", config.num_warps, (1, 2, 4, 8)),
                ("num_stages", config.num_stages, range(1, 9)),
                ("programs", config.programs, range(9)),
                ("group_m", config.group_m, range(1, 65)),
                ("loads", config.loads, ("pointer", "descriptor")),
            )
        ),
        (config.block_m * config.block_n <= LARGEST_TILE * config.num_warps // 8,
         f"a tile of {config.block_m} x {config.block_n} does not fit into the registers of "
         f"{config.num_warps} warps"),
        (not tma or facts.arch in TMA_ARCHS or facts.kind == "cpu",
         f"loads 'descriptor' needs TMA, which {facts.arch} does not have"),
        (not tma or _row_bytes(key) % DESCRIBED_BYTES == 0,
         f"loads 'descriptor' needs rows of whole 16 bytes, and in_features is {key.in_features}"),
        (facts.kind != "hip" or config.num_stages <= 2,
         f"num_stages {config.num_stages} on AMD is limited to 2"),
        (config.maxnreg == 0 or (32 <= config.maxnreg <= 255 and facts.kind != "hip"),
         f"maxnreg {config.maxnreg} is not between 32 and 255, on NVIDIA"),
        (config.waves_per_eu == 0 or (1 <= config.waves_per_eu <= 8 and facts.kind != "cuda"),
         f"waves_per_eu {config.waves_per_eu} is not between 1 and 8, on AMD"),
        (config.matrix_instr_nonkdim in (0, 16, 32)
         and (config.matrix_instr_nonkdim == 0 or facts.kind != "cuda"),
         f"matrix_instr_nonkdim {config.matrix_instr_nonkdim} is not 16 or 32, on AMD"),
    )  # fmt: skip
    for legal, reason in checks:
        if not legal:
            return reason
    needed = smem_lower_bound(config) * element_bytes(key)
    if facts.smem_bytes and needed > facts.smem_bytes:
        return (
            f"needs at least {needed} bytes of shared memory, {facts.name} has {facts.smem_bytes}"
        )
    return None


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


def _fill(_: LinearKey) -> str:
    return f"`{launch_config.fill_command(LINEAR)}` fills all, report() counts them"


RULES = LaunchRules(default_launch, illegal_reason, tune_command, _words, _fill)


def region_of(regions: Sequence[LinearRegion], rows: int, facts: DeviceFacts) -> LinearRegion:
    """Return the first region that serves so many rows on a device.

    Raises:
        ConfigError: there is none.
    """
    arch = "emulation" if facts.kind == "cpu" else facts.arch
    for region in regions:
        if rows <= region.max_rows and fnmatchcase(arch, region.arch):
            return region
    raise ConfigError(f"linears have no launch config for {arch}; use kernel='bf16'")
