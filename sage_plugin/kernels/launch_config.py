"""The look-up of a call's launch config, for every op family."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sage_plugin import device, files, settings
from sage_plugin.errors import ConfigError
from sage_plugin.kernels.contract import ResolvedConfig
from sage_plugin.kernels.notice import warn_once
from sage_plugin.schema import (
    NO_SPEEDS,
    CallKey,
    DeviceFacts,
    LaunchConfig,
    LinearLaunch,
    RegistryEntry,
)

logger = logging.getLogger(__name__)

UNTUNED = "untuned call signatures"
RECORDING = Path("captured_inputs")
"""Where `sage capture` records unless told otherwise."""
MEMO_LIMIT = 65_536
"""Keys remembered before the memo starts anew: language models see a new length a token."""

Answer = TypeVar("Answer")


class LaunchRules(NamedTuple):
    """What the look-up asks of an op family.

    Attributes:
        default: the architecture's default config of a key.
        illegal_reason: why a config cannot run a key on a device, or `None`.
        tune_command: the `sage tune` command that fills a miss.
    """

    default: Callable[[CallKey, DeviceFacts], LaunchConfig]
    illegal_reason: Callable[[LaunchConfig, CallKey, DeviceFacts], str | None]
    tune_command: Callable[[CallKey], str]


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


def find(
    key: CallKey, facts: DeviceFacts, rules: LaunchRules, *, config_dir: str | None = None
) -> ResolvedConfig:
    """Return the launch config of a call: environment, registry, or architecture default.

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
        found = _look_up(key, facts, rules, config_dir)
        _memo.keep(at, found)
    return found


def compiler_options(config: LaunchConfig | LinearLaunch) -> dict[str, int]:
    """The fields of a launch config that are options of the compiler, set ones only.

    Fusing products with sums is Triton's default up to 3.9 and what all figures were taken with.
    """
    options: dict[str, int] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    for name in ("maxnreg", "waves_per_eu", "matrix_instr_nonkdim"):
        if value := getattr(config, name):
            options[name] = value
    return options


def forget() -> None:
    """Drop every memoised config, so that files written since are seen."""
    from sage_plugin.registry import lookup

    with _lock:
        for memo in _memos:
            memo.clear()
        _missed.clear()
    lookup.clear()


def _look_up(
    key: CallKey, facts: DeviceFacts, rules: LaunchRules, config_dir: str | None
) -> ResolvedConfig:
    from sage_plugin.registry import lookup, staleness

    def legal(config: LaunchConfig) -> bool:
        return rules.illegal_reason(config, key, facts) is None

    found = lookup.find(key, facts=facts, config_dir=config_dir, is_legal=legal)
    if found is not None:
        base = ResolvedConfig(
            found.entry.config,
            found.source,
            f"{found.label}: {found.path}",
            _saved_ms(found.entry, key),
            () if key.variant in NO_SPEEDS else staleness.changes(found.entry, device.toolchain()),
        )
    else:
        base = ResolvedConfig(rules.default(key, facts), "default", f"default of {facts.arch}")
        _note_miss(key, facts, rules)
    override = settings.current().launch
    if override is None:
        return base
    config = _overridden(base.config, override)
    if reason := rules.illegal_reason(config, key, facts):
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
    fields = files.loads(text, "SAGE_PLUGIN_LAUNCH")
    if not isinstance(fields, dict):
        raise ConfigError(f"SAGE_PLUGIN_LAUNCH is {type(fields).__name__}, expected a JSON object")
    try:
        return LaunchConfig.from_json({**config.to_json(), **fields})
    except ConfigError as error:
        raise ConfigError(f"SAGE_PLUGIN_LAUNCH: {error}") from None


def fill_command() -> str:
    """Return the command that tunes all calls on defaults, from a recording if one is here."""
    recorded = (RECORDING / "manifest.jsonl").exists()
    return f"{'' if recorded else 'sage capture SCRIPT.py && '}sage tune {RECORDING}"


def _note_miss(key: CallKey, facts: DeviceFacts, rules: LaunchRules) -> None:
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
        rules.tune_command(key),
    )  # fmt: skip
    warn_once(
        logger, UNTUNED,
        "no tuned config for some calls on %s, the first of them of %s:%s with head dim %d: using "
        "defaults; `%s` fills all (said once, report() counts them)",
        facts.name, key.kernel, key.variant, key.head_dim, fill_command(),
    )  # fmt: skip
