"""Launch configs: the default, the search space, legality, and the look-up of a call."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any, TypeVar

from sage_plugin import settings
from sage_plugin.errors import ConfigError
from sage_plugin.kernels.contract import ResolvedConfig
from sage_plugin.kernels.notice import warn_once
from sage_plugin.kernels.search_space import Region
from sage_plugin.kernels.support import FP8_KERNELS
from sage_plugin.schema import CallKey, DeviceFacts, LaunchConfig, RegistryEntry

logger = logging.getLogger(__name__)

TMA_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
SMALLEST_BLOCK = 16
SMALLEST_8BIT_BLOCK = 32
LARGEST_BLOCK = 256
HADAMARD_BLOCKS = (16, 32, 64, 128)
HOPPER_ROWS, HOPPER_KEYS = (128, 192), (64, 128)
LARGEST_FLUSH = 4096
MOST_LINEAR = 6
"""A block keeps exact weights, in which a NaN of its keys shows."""
Q_GRANULES = (1, 2, 4, 8, 16, 32, 64, 128)
NO_SPEEDS = ("emulation",)
"""Variants whose times say nothing of a kernel."""
UNTUNED = "untuned call signatures"
TUNE_ALL = "sage tune --from-captures"
"""The command that tunes every call of a recorded model."""
MEMO_LIMIT = 65_536
"""Keys remembered before the memo starts anew: language models see a new length a token."""

Answer = TypeVar("Answer")
Checks = tuple[tuple[bool, str], ...]
"""Conditions of legality, each with what is wrong where it does not hold."""


class Memo(dict[tuple[object, ...], Answer]):
    """Answers by key that `forget` drops, as many as a limit, `MEMO_LIMIT` if `None`."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self._limit = limit
        _memos.append(self)

    def keep(self, key: tuple[object, ...], answer: Answer) -> None:
        """Remember an answer."""
        with _lock:
            if len(self) >= (self._limit or MEMO_LIMIT):
                self.clear()
            self[key] = answer


_memos: list[Memo[Any]] = []
_lock = threading.Lock()
_memo: Memo[ResolvedConfig] = Memo()
_missed: set[tuple[object, ...]] = set()


def find_launch(
    key: CallKey, facts: DeviceFacts, *, config_dir: str | None = None
) -> ResolvedConfig:
    """The launch config of a call: environment, registry (exact or near), architecture default.

    The result, a miss too, is memoised by key, device, folder and environment; no file is read
    after the first look. The first miss of a process on a GPU is warned about, with the one command
    that fills all of them; each has a line among the log's details.

    Raises:
        ConfigError: `SAGE_PLUGIN_LAUNCH` is not a JSON object of launch config fields.
    """
    now = settings.current()
    at = (key, facts.slug, config_dir or "", now.config_dir, now.launch)
    found = _memo.get(at)
    if found is None:
        found = _look_up(key, facts, config_dir)
        _memo.keep(at, found)
    return found


def forget() -> None:
    """Drop every memoised config, so that files written since are seen."""
    from sage_plugin.registry import lookup

    with _lock:
        for memo in _memos:
            memo.clear()
        _missed.clear()
    lookup.clear()


def default_launch(key: CallKey, facts: DeviceFacts) -> LaunchConfig:
    """The architecture default of a call.

    Raises:
        ConfigError: the kernel has no launch config on this hardware.
    """
    return _region(key, facts).default


def candidates(key: CallKey, facts: DeviceFacts) -> tuple[LaunchConfig, ...]:
    """Legal launch configs to search for a call, the default first."""
    every = _region(key, facts).candidates()
    return tuple(c for c in every if illegal_reason(c, key, facts) is None)


def illegal_reason(config: LaunchConfig, key: CallKey, facts: DeviceFacts) -> str | None:
    """Why a launch config cannot run a call on a device, in one sentence, or `None`."""
    tiles = {"hopper": _hopper_checks, "emulation": _emulation_checks}.get(
        key.variant, _portable_checks
    )
    checks = (
        *tiles(config, key),
        (1 <= config.num_stages <= 8, f"num_stages {config.num_stages} is not between 1 and 8"),
        (config.loads in ("pointer", "descriptor"),
         f"loads {config.loads!r} is neither 'pointer' nor 'descriptor'"),
        *_quantization_checks(config, key),
        (config.loads != "descriptor" or facts.arch in TMA_ARCHS or facts.kind == "cpu",
         f"loads 'descriptor' needs TMA, which {facts.arch} does not have"),
        (facts.kind != "hip" or config.num_stages <= 2,
         f"num_stages {config.num_stages} on AMD is limited to 2"),
        (config.maxnreg == 0 or (32 <= config.maxnreg <= 255 and facts.kind != "hip"),
         f"maxnreg {config.maxnreg} is not between 32 and 255, on NVIDIA"),
        (config.waves_per_eu == 0 or (1 <= config.waves_per_eu <= 8 and facts.kind != "cuda"),
         f"waves_per_eu {config.waves_per_eu} is not between 1 and 8, on AMD"),
        (config.matrix_instr_nonkdim == 0
         or (config.matrix_instr_nonkdim in (16, 32) and facts.kind != "cuda"),
         f"matrix_instr_nonkdim {config.matrix_instr_nonkdim} is not 16 or 32, on AMD"),
    )  # fmt: skip
    for legal, reason in checks:
        if not legal:
            return reason
    needed = smem_lower_bound(config, key)
    if facts.smem_bytes and key.variant != "emulation" and needed > facts.smem_bytes:
        return (
            f"needs at least {needed} bytes of shared memory, {facts.name} has {facts.smem_bytes}"
        )
    return None


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


def _block(size: int, smallest: int) -> bool:
    return smallest <= size <= LARGEST_BLOCK and size & (size - 1) == 0


def _region(key: CallKey, facts: DeviceFacts) -> Region:
    arch = "emulation" if key.variant == "emulation" or facts.kind == "cpu" else facts.arch
    from sage_plugin.kernels.attention.search_space import SPACES

    space = SPACES[key.kernel]
    element_bytes = 4 if key.dtype == "float32" else 2
    region = space.region(arch, key.head_dim, element_bytes, key.mask_kind, key.variant)
    if region is None:
        raise ConfigError(
            f"kernel {key.kernel}:{key.variant} has no launch config for {arch} at head dim "
            f"{key.head_dim}; use kernel='sdpa'"
        )
    return region


def _look_up(key: CallKey, facts: DeviceFacts, config_dir: str | None) -> ResolvedConfig:
    from sage_plugin.registry import lookup

    def legal(config: LaunchConfig) -> bool:
        return illegal_reason(config, key, facts) is None

    found = lookup.find(key, facts=facts, config_dir=config_dir, is_legal=legal)
    if found is not None:
        saved_ms = _saved_ms(found.entry, key)
        base = ResolvedConfig(
            found.entry.config, found.source, f"{found.label}: {found.path}", saved_ms
        )
    else:
        base = ResolvedConfig(default_launch(key, facts), "default", f"default of {facts.arch}")
        _note_miss(key, facts)
    override = settings.current().launch
    if override is None:
        return base
    config = _overridden(base.config, override)
    if reason := illegal_reason(config, key, facts):
        raise ConfigError(
            f"SAGE_PLUGIN_LAUNCH gives a config that {facts.name} cannot run: {reason}"
        )
    return ResolvedConfig(config, "env", f"SAGE_PLUGIN_LAUNCH over {base.detail}")


def _saved_ms(entry: RegistryEntry, key: CallKey) -> float | None:
    """What a call saves by the times of an entry, which go by the work where lengths differ."""
    host, own = entry.evidence.host_time, entry.evidence.time
    if host is None or key.variant in NO_SPEEDS:
        return None
    return (host.median_ms - own.median_ms) * _pairs(key) / _pairs(entry.key)


def _pairs(key: CallKey) -> int:
    return max(1, key.batch_heads * key.seq_q * key.seq_k)


def _overridden(config: LaunchConfig, text: str) -> LaunchConfig:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"SAGE_PLUGIN_LAUNCH is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"SAGE_PLUGIN_LAUNCH is {type(fields).__name__}, expected a JSON object")
    try:
        return LaunchConfig.from_json({**config.to_json(), **fields})
    except ConfigError as error:
        raise ConfigError(f"SAGE_PLUGIN_LAUNCH: {error}") from None


def _note_miss(key: CallKey, facts: DeviceFacts) -> None:
    """Say once that calls run untuned, and log each; silent on a CPU, where speed is no aim."""
    if facts.kind == "cpu":
        return
    at = (key.discrete(), facts.slug)
    with _lock:
        if at in _missed:
            return
        _missed.add(at)
    logger.info(
        "no tuned config for %s:%s (head dim %d, Sq %d, Sk %d, %s) on %s: using the default; "
        "`%s` fills it",
        key.kernel, key.variant, key.head_dim, key.seq_q, key.seq_k, key.dtype, facts.name,
        tune_command(key),
    )  # fmt: skip
    warn_once(
        logger, UNTUNED,
        "no tuned config for some calls on %s, the first of them of %s:%s with head dim %d: using "
        "defaults; record the model with `sage capture`, and `%s` fills all (said once)",
        facts.name, key.kernel, key.variant, key.head_dim, TUNE_ALL,
    )  # fmt: skip
