"""Launch configs of attention: defaults, what a search tries, and what is legal on a device."""

from __future__ import annotations

import dataclasses

from sage_plugin.errors import ConfigError
from sage_plugin.kernels.attention.search_space import SPACES
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.kernels.legality import LOADS, Checks, first_wrong, hardware_checks
from sage_plugin.kernels.search_space import Region
from sage_plugin.kernels.support import FP8_KERNELS
from sage_plugin.schema import CallKey, DeviceFacts, LaunchConfig

SMALLEST_BLOCK = 16
SMALLEST_8BIT_BLOCK = 32
LARGEST_BLOCK = 256
HADAMARD_BLOCKS = (16, 32, 64, 128)
HOPPER_ROWS, HOPPER_KEYS = (128, 192), (64, 128)
LARGEST_FLUSH = 4096
MOST_LINEAR = 6
"""A block keeps exact weights, in which a NaN of its keys shows."""
Q_GRANULES = (1, 2, 4, 8, 16, 32, 64, 128)


def default_launch(key: CallKey, facts: DeviceFacts) -> LaunchConfig:
    """The architecture default of a call."""
    return _region(key, facts).default


def default_config(
    kernel: str, arch: str, head_dim: int, dtype: str = "bfloat16", variant: str = "portable"
) -> LaunchConfig | None:
    """The default launch config of a call without a mask; `None` where the kernel has none."""
    element_bytes = 4 if dtype == "float32" else 2
    region = SPACES[kernel].region(arch, head_dim, element_bytes, variant=variant)
    return None if region is None else region.default


def search_space(key: CallKey, facts: DeviceFacts) -> tuple[LaunchConfig, ...]:
    """Launch configs to search for a call, legal or not, the default first."""
    region = _region(key, facts)
    if key.causal and "persistent" in region.axes:  # tiles of causal calls have a program each
        only = {**region.axes, "persistent": (region.default.persistent,)}
        region = dataclasses.replace(region, axes=only)
    return region.candidates(SPACES[key.kernel].recipes.get(key.variant))


def candidates(key: CallKey, facts: DeviceFacts) -> tuple[LaunchConfig, ...]:
    """Legal launch configs to search for a call, the default first."""
    return tuple(c for c in search_space(key, facts) if illegal_reason(c, key, facts) is None)


def illegal_reason(config: LaunchConfig, key: CallKey, facts: DeviceFacts) -> str | None:
    """Why a launch config cannot run a call on a device, in one sentence, or `None`."""
    tiles = {"hopper": _hopper_checks, "emulation": _emulation_checks}.get(
        key.variant, _portable_checks
    )
    checks = (
        *tiles(config, key),
        (1 <= config.num_stages <= 8, f"num_stages {config.num_stages} is not between 1 and 8"),
        (config.loads in LOADS,
         f"loads {config.loads!r} is neither 'pointer' nor 'descriptor'"),
        *_quantization_checks(config, key),
        *hardware_checks(config, facts),
    )  # fmt: skip
    needed = 0 if key.variant == "emulation" else smem_lower_bound(config, key)
    return first_wrong(checks, needed, facts)


def _portable_checks(config: LaunchConfig, key: CallKey) -> Checks:
    """Legality of the tile and of what the Hopper variants alone have."""
    smallest_n = SMALLEST_BLOCK if key.kernel == "fav2" else SMALLEST_8BIT_BLOCK
    return (
        (_block(config.block_m, SMALLEST_BLOCK), f"block_m {config.block_m} is not a power of two "
         f"between {SMALLEST_BLOCK} and {LARGEST_BLOCK}"),
        (_block(config.block_n, smallest_n), f"block_n {config.block_n} is not a power of two "
         f"between {smallest_n} and {LARGEST_BLOCK}"),
        (config.num_warps in (1, 2, 4, 8, 16),
         f"num_warps {config.num_warps} is not 1, 2, 4, 8 or 16"),
        (config.pv_flush in (0, 1), f"pv_flush {config.pv_flush} is neither 0 nor 1"),
        (config.exp_linear == 0 and not config.overlap and not config.persistent,
         "exp_linear, overlap and persistent belong to the Hopper variants"),
    )  # fmt: skip


def _hopper_checks(config: LaunchConfig, key: CallKey) -> Checks:
    """Legality of the tile of a Hopper variant: warpgroups of 64 rows, whole groups of keys."""
    return (
        (config.block_m in HOPPER_ROWS, f"block_m {config.block_m} is not 128 or 192"),
        (config.block_n in HOPPER_KEYS, f"block_n {config.block_n} is not 64 or 128"),
        (config.num_warps * 16 == config.block_m,
         f"num_warps {config.num_warps} is not block_m / 16, one warp to 16 rows"),
        (config.num_stages >= 2, f"num_stages {config.num_stages} is under 2"),
        (config.loads == "descriptor", f"loads {config.loads!r} is not 'descriptor'"),
        (0 <= config.pv_flush <= LARGEST_FLUSH,
         f"pv_flush {config.pv_flush} is not between 0 and {LARGEST_FLUSH}"),
        *_linear_checks(config, key),
        (config.maxnreg == 0 or _fits_an_sm(config),
         f"maxnreg {config.maxnreg} is not a multiple of 8 from 128 up that an SM has for "
         f"{config.block_m // 64} warpgroups and one that loads"),
        (not config.overlap or key.head_dim <= 64 or config.block_n == 64,
         f"overlap leaves no registers at head dim {key.head_dim} with blocks of 128 keys"),
    )  # fmt: skip


def _fits_an_sm(config: LaunchConfig) -> bool:
    """Whether an SM has the registers of a Hopper variant's warpgroups; fewer than 128 spill."""
    threads, loading = config.num_warps * 32, 128 * 24
    enough = config.maxnreg >= 128 and config.maxnreg % 8 == 0
    return enough and threads * config.maxnreg + loading <= 65_536


def _emulation_checks(config: LaunchConfig, key: CallKey) -> Checks:
    """The emulation stands for every variant's configs."""
    hopper = _hopper_checks(config, key)
    return hopper if all(legal for legal, _ in hopper) else _portable_checks(config, key)


def _linear_checks(config: LaunchConfig, key: CallKey) -> Checks:
    eighths, fp8 = config.exp_linear, key.kernel in FP8_KERNELS
    return (
        (eighths == 0 or fp8, f"exp_linear needs FP8 weights, which {key.kernel} has not"),
        (0 <= eighths <= MOST_LINEAR and eighths * config.block_n % 128 == 0,
         f"exp_linear {eighths} is not a number of whole groups of 16 keys, at most {MOST_LINEAR} "
         "eighths of the block"),
    )  # fmt: skip


def _quantization_checks(config: LaunchConfig, key: CallKey) -> Checks:
    """Legality of the fields that choose how Q and K are quantised."""
    turned, granule = config.hadamard, config.q_granule
    return (
        (key.kernel != "fav2" or (turned == 0 and granule == 1),
         "hadamard and q_granule belong to quantised kernels, which fav2 is not"),
        (turned == 0 or (turned in HADAMARD_BLOCKS and key.head_dim % turned == 0),
         f"hadamard {turned} is neither 0 nor one of {', '.join(map(str, HADAMARD_BLOCKS))} that "
         f"divides head dim {key.head_dim}"),
        (granule in Q_GRANULES,
         f"q_granule {granule} is not a power of two up to {Q_GRANULES[-1]}"),
    )  # fmt: skip


def smem_lower_bound(config: LaunchConfig, key: CallKey) -> int:
    """Bytes of shared memory that a launch needs at least: its pipelined K and V blocks.

    With one stage nothing is pipelined, and blocks may pass through registers piece by piece.
    """
    element = {"float32": 4}.get(key.dtype, 2)
    k_bytes = element if key.kernel == "fav2" else 1
    v_bytes = {"fav2": element, "sage": 2}.get(key.kernel, 1)
    width = 1 << max(4, (key.head_dim - 1).bit_length())
    if key.variant == "hopper":
        totals = 4 * config.block_m * width if config.pv_flush else 0
        ring = config.num_stages * config.block_n * width * (k_bytes + v_bytes)
        return config.block_m * width + ring + totals
    return (config.num_stages - 1) * config.block_n * width * (k_bytes + v_bytes)


def tune_command(key: CallKey) -> str:
    """The `sage tune` command that would fill a miss."""
    parts = [f"sage tune --kernel {key.kernel}:{key.variant} --seq-len {key.seq_q}"]
    if key.seq_k != key.seq_q:
        parts.append(f"-sk {key.seq_k}")
    parts.append(f"--num-heads {key.batch_heads} --head-dim {key.head_dim}")
    if key.gqa_ratio > 1:
        parts.append(f"-hk {key.batch_heads // key.gqa_ratio}")
    parts.append(f"--dtype {key.dtype} --layout {key.layout}" + (" --causal" if key.causal else ""))
    if key.mask_kind != "none":
        parts.append(f"--mask {key.mask_kind}")
    return " ".join(parts)


def _words(key: CallKey) -> tuple[str, ...]:
    return f"head dim {key.head_dim}", f"Sq {key.seq_q}", f"Sk {key.seq_k}", key.dtype


RULES = LaunchRules(
    LaunchConfig,
    default_launch,
    search_space,
    illegal_reason,
    tune_command,
    _words,
    "variant='emulation'",
    counted=True,
)
find_launch = RULES.find


def _block(size: int, smallest: int) -> bool:
    return smallest <= size <= LARGEST_BLOCK and size & (size - 1) == 0


def _region(key: CallKey, facts: DeviceFacts) -> Region[LaunchConfig]:
    arch = "emulation" if key.variant == "emulation" or facts.kind == "cpu" else facts.arch
    element_bytes = 4 if key.dtype == "float32" else 2
    region = SPACES[key.kernel].region(
        arch, key.head_dim, element_bytes, key.mask_kind, key.variant
    )
    if region is None:
        raise ConfigError(
            f"kernel {key.kernel}:{key.variant} has no launch config for {arch} at head dim "
            f"{key.head_dim}; use kernel='sdpa'"
        )
    return region
