"""The look-up of a call's launch config, for every op family."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sage_plugin import device, files, settings
from sage_plugin.errors import ConfigError
from sage_plugin.kernels.contract import ResolvedConfig
from sage_plugin.kernels.notice import warn_once
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import (
    ATTENTION,
    GROUPED_LINEAR,
    LINEAR,
    NO_SPEEDS,
    AnyEntry,
    AnyKey,
    AnyLaunch,
    DeviceFacts,
)

logger = logging.getLogger(__name__)

UNTUNED = "untuned call signatures"
RECORDING = Path("captured_inputs")
"""Where `sage capture` records unless told otherwise."""
MEMO_LIMIT = 65_536
"""Keys remembered before the memo starts anew: language models see a new length a token."""

OVERRIDES = {
    ATTENTION: "SAGE_PLUGIN_LAUNCH",
    LINEAR: "SAGE_PLUGIN_LINEAR_LAUNCH",
    GROUPED_LINEAR: "SAGE_PLUGIN_LINEAR_LAUNCH",
    PAGED_ATTENTION: "SAGE_PLUGIN_PAGED_LAUNCH",
}
"""The variable that overrides fields of launch configs, by op family."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LaunchRules:
    """The launch configs of an op family.

    Attributes:
        kind: their class.
        default: the architecture's default config of a key.
        search: configs to search for a key, legal or not, the default first.
        illegal_reason: why a config cannot run a key on a device, or `None`.
        tune_command: the `sage tune` command that fills a miss.
        words: what a call is, for logs, the most telling first.
        emulation: how a caller asks for the emulation of `{kernel}`.
        counted: whether reports of patched models count calls without a tuned config.
    """

    kind: type
    default: Callable[[Any, DeviceFacts], Any]
    search: Callable[[Any, DeviceFacts], tuple[Any, ...]]
    illegal_reason: Callable[[Any, Any, DeviceFacts], str | None]
    tune_command: Callable[[Any], str]
    words: Callable[[Any], tuple[str, ...]]
    emulation: str
    counted: bool = False

    def find(
        self, key: AnyKey, facts: DeviceFacts, *, config_dir: str | None = None
    ) -> ResolvedConfig:
        """Return the launch config of a call, see `find`.

        Raises:
            ConfigError: the environment's launch config cannot be read, or is not legal.
        """
        return find(key, facts, self, config_dir=config_dir)

    def fill(self, key: AnyKey) -> str:
        """Return which command fills a miss and others like it."""
        if self.counted:
            return f"`{fill_command(key.family)}` fills all, report() counts them"
        return f"`{self.tune_command(key)}` tunes it, and others alike"


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
    key: AnyKey, facts: DeviceFacts, rules: LaunchRules, *, config_dir: str | None = None
) -> ResolvedConfig:
    """Return the launch config of a call: environment, registry, or architecture default.

    The result, a miss too, is memoised by key, device, folder and environment; no file is read
    after the first look. The first miss of a process on a GPU is warned about, with the one command
    that fills all of them; each has a line among the log's details.

    Raises:
        ConfigError: the family's variable (`OVERRIDES`) is not a JSON object of launch config
            fields, or its config is not legal.
    """
    now = settings.current()
    overrides = (now.launch, now.linear_launch, now.paged_launch)
    at = (key, facts.slug, config_dir or "", now.config_dir, *overrides)
    found = _memo.get(at)
    if found is None:
        found = _look_up(key, facts, rules, config_dir)
        _memo.keep(at, found)
    return found


def compiler_options(config: AnyLaunch) -> dict[str, int]:
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
    key: AnyKey, facts: DeviceFacts, rules: LaunchRules, config_dir: str | None
) -> ResolvedConfig:
    from sage_plugin.registry import lookup, staleness

    def legal(config: AnyLaunch) -> bool:
        return rules.illegal_reason(config, key, facts) is None

    found = lookup.find(key, facts=facts, config_dir=config_dir, is_legal=legal)
    if found is not None:
        base = ResolvedConfig(
            found.entry.config,
            found.source,
            f"{found.label}: {found.path}",
            _saved_ms(found.entry, key),
            ()
            if key.variant in NO_SPEEDS
            else staleness.changes(found.entry, device.toolchain(key.family)),
        )
    else:
        base = ResolvedConfig(rules.default(key, facts), "default", f"default of {facts.arch}")
        _note_miss(key, facts, rules)
    now, variable = settings.current(), OVERRIDES[key.family]
    overrides = {ATTENTION: now.launch, PAGED_ATTENTION: now.paged_launch}
    override = overrides.get(key.family, now.linear_launch)
    if override is None:
        return base
    config = _overridden(base.config, override, variable)
    if reason := rules.illegal_reason(config, key, facts):
        raise ConfigError(f"{variable} gives a config that {facts.name} cannot run: {reason}")
    return ResolvedConfig(config, "env", f"{variable} over {base.detail}")


def _saved_ms(entry: AnyEntry, key: AnyKey) -> float | None:
    """What a call saves by the times of an entry, which go by the work where lengths differ."""
    host, own = entry.evidence.host_time, entry.evidence.time
    if host is None or key.variant in NO_SPEEDS:
        return None
    more = math.prod(key.numbers()) / max(1, math.prod(entry.key.numbers()))
    return (host.median_ms - own.median_ms) * more


def _overridden(config: AnyLaunch, text: str, variable: str) -> AnyLaunch:
    fields = files.loads(text, variable)
    if not isinstance(fields, dict):
        raise ConfigError(f"{variable} is {type(fields).__name__}, expected a JSON object")
    try:
        return type(config).from_json({**config.to_json(), **fields})
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None


def fill_command(family: str = ATTENTION) -> str:
    """Return the command that tunes all calls on defaults, from a recording if one is here."""
    recorded = (RECORDING / "manifest.jsonl").exists()
    op = "" if family == ATTENTION else f" --op {family}"
    return f"{'' if recorded else f'sage capture{op} SCRIPT.py && '}sage tune {RECORDING}{op}"


def _note_miss(key: AnyKey, facts: DeviceFacts, rules: LaunchRules) -> None:
    """Say once that calls run untuned, and log each; silent on a CPU, where speed is no aim."""
    if facts.kind == "cpu":
        return
    at = (key.discrete(), facts.slug)
    with _lock:
        if at in _missed:
            return
        _missed.add(at)
    logger.info(
        "no tuned config for %s:%s (%s) on %s: using the default; `%s` fills it",
        key.kernel, key.variant, ", ".join(rules.words(key)), facts.name, rules.tune_command(key),
    )  # fmt: skip
    warn_once(
        logger, (UNTUNED, key.family),
        "no tuned config for some calls on %s, the first of them of %s:%s with %s: using defaults; "
        "%s (said once)",
        facts.name, key.kernel, key.variant, rules.words(key)[0], rules.fill(key),
    )  # fmt: skip
