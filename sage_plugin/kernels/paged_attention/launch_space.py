"""Launch configs of paged attention: defaults, what a search tries, and what is legal."""

from __future__ import annotations

from sage_plugin.errors import ConfigError
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.kernels.legality import LOADS, POWERS, first_wrong, hardware_checks, one_of
from sage_plugin.kernels.paged_attention.search_space import REGIONS
from sage_plugin.kernels.search_space import Region
from sage_plugin.paged_records import PagedKey, PagedLaunch
from sage_plugin.schema import DeviceFacts

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of a cache's element; all other types have one."""

MOST_SPLITS = 128


def default_launch(key: PagedKey, facts: DeviceFacts) -> PagedLaunch:
    """Return the architecture default of a call.

    Raises:
        ConfigError: no kernel runs on this hardware.
    """
    return _runnable(_region(key, facts).default, key)


def search_space(key: PagedKey, facts: DeviceFacts) -> tuple[PagedLaunch, ...]:
    """Return the launch configs to search, legal or not, the default first."""
    region = _region(key, facts)
    found = region.candidates()
    return tuple(dict.fromkeys(_runnable(config, key) for config in found))


def _runnable(config: PagedLaunch, key: PagedKey) -> PagedLaunch:
    """Return a config whose tiles hold all heads of a token, and whose loads stay in a page."""
    config = config.replaced(block_m=max(config.block_m, tile_rows(key.gqa_ratio)))
    if config.loads == "descriptor" and not described(config.block_n, key):
        return config.replaced(loads="pointer")
    return config


def tile_rows(group: int) -> int:
    """Return the fewest rows of a tile, a power of two from 16.

    Example:
        >>> tile_rows(4), tile_rows(20)
        (16, 32)
    """
    return max(16, 1 << (group - 1).bit_length())


def described(block_n: int, key: PagedKey) -> bool:
    """Return whether descriptors can load the steps of a call: parts of a page, whole rows."""
    width = key.head_dim * BYTES.get(key.cache_dtype, 1)
    whole = key.head_dim >= 16 and key.head_dim & (key.head_dim - 1) == 0
    return key.page_size % block_n == 0 and whole and width % 16 == 0


def illegal_reason(config: PagedLaunch, key: PagedKey, facts: DeviceFacts) -> str | None:
    """Return why a launch config cannot run a call on a device, in one sentence, or `None`."""
    checks = (
        *one_of(
            config, block_m=POWERS, block_n=POWERS, num_warps=(1, 2, 4, 8),
            num_stages=range(1, 9), loads=LOADS,
        ),
        (0 <= config.splits <= MOST_SPLITS,
         f"splits {config.splits} is not between 0 and {MOST_SPLITS}"),
        (config.block_m >= key.gqa_ratio,
         f"block_m {config.block_m} does not hold the {key.gqa_ratio} query heads of a key head"),
        *hardware_checks(config, facts),
        (config.loads != "descriptor" or described(config.block_n, key),
         f"loads 'descriptor' needs steps inside of a page and heads of a power of two, and "
         f"block_n is {config.block_n}, page_size {key.page_size}, head_dim {key.head_dim}"),
    )  # fmt: skip
    return first_wrong(checks, smem_lower_bound(config, key), facts)


def smem_lower_bound(config: PagedLaunch, key: PagedKey) -> int:
    """Return the bytes of shared memory that a launch needs at least: its pipelined steps."""
    step = config.block_n * key.head_dim * BYTES.get(key.cache_dtype, 1)
    return 2 * max(0, config.num_stages - 1) * step


def tune_command(key: PagedKey) -> str:
    """Return the `sage tune` command that would fill a miss."""
    return (
        f"sage tune --op paged_attention --kernel {key.kernel}:{key.variant} "
        f"--kind {key.kind} --page-size {key.page_size} --num-sequences {key.sequences} "
        f"--num-q-heads {key.heads_k * key.gqa_ratio} --num-kv-heads {key.heads_k} "
        f"--head-dim {key.head_dim} --max-model-len {key.max_keys} --q-dtype {key.dtype} "
        f"--kv-dtype {key.cache_dtype}"
    )


def _words(key: PagedKey) -> tuple[str, ...]:
    return (
        f"{key.kind} of {key.tokens} tokens", f"pages of {key.page_size}",
        f"{key.gqa_ratio} heads a key head of {key.head_dim}", key.cache_dtype,
    )  # fmt: skip


RULES = LaunchRules(
    PagedLaunch,
    default_launch,
    search_space,
    illegal_reason,
    tune_command,
    _words,
    "kernel='{kernel}:emulation'",
)
find_launch = RULES.find


def _region(key: PagedKey, facts: DeviceFacts) -> Region[PagedLaunch]:
    arch = "emulation" if facts.kind == "cpu" else facts.arch
    size = BYTES.get(key.cache_dtype, 1)
    for region in REGIONS:
        whole = region.default.loads != "descriptor" or described(region.default.block_n, key)
        if whole and region.serves(arch, key.head_dim, size, kind=key.kind):
            return region
    raise ConfigError(f"paged attention has no launch config for {arch}")
