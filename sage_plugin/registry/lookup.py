"""Find the tuned config of a call: exact key, else the nearest one that reaches it, else nothing.

Everything is remembered, misses too: after the first look at a file nothing here touches the disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_plugin import files, settings
from sage_plugin.errors import ConfigError
from sage_plugin.registry import distance, load
from sage_plugin.schema import AnyEntry, AnyKey, DeviceFacts, RegistryFile

logger = logging.getLogger(__name__)

MEMO_LIMIT = 65_536
"""Keys remembered before the memo starts anew: language models see a new length a prompt."""

IsLegal = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Match:
    """A config found for a key.

    Attributes:
        entry: the registry entry.
        source: `"exact"`, or `"near"` where its key differs.
        nearness: how well it fits.
        path: the file that holds it.
        label: which place that file is (`"argument"`, `"env"`, `"user"`, `"shipped"`).
    """

    entry: AnyEntry
    source: str
    nearness: distance.Nearness
    path: Path
    label: str


_lock = threading.RLock()
_files: dict[tuple[Path, str, str], RegistryFile | None] = {}
_ranked: dict[tuple[object, ...], tuple[Match, ...]] = {}


def find(
    key: AnyKey,
    *,
    facts: DeviceFacts,
    config_dir: str | Path | None = None,
    is_legal: IsLegal | None = None,
) -> Match | None:
    """Find the config for a call on a device.

    An entry serves a call that differs in numbers of its key, layout and 16-bit dtype
    (`distance.py`). The exact key comes first, then entries whose measured range holds the lengths,
    then those that reach them; of equals, places come in the order of `load.search_path`, so that a
    far entry of an early place does not hide an exact one of a later. Within a place, the same
    dtype and layout come first, then the nearest in log space. A damaged or foreign file is a miss
    with one warning, never an exception.

    Args:
        key: the call.
        facts: the device; another device's configs are never used.
        config_dir: folder to ask first.
        is_legal: whether a config may run this call; an illegal one is passed over.

    Returns:
        The match, or `None` where no place has a legal one.
    """
    memo_key = (key, facts.slug, facts.arch, config_dir, settings.current().config_dir)
    ranked = _ranked.get(memo_key)
    if ranked is None:
        with _lock:
            ranked = _rank(key, facts, config_dir)
            if len(_ranked) >= MEMO_LIMIT:
                _ranked.clear()
            _ranked[memo_key] = ranked
    for match in ranked:
        if is_legal is None or is_legal(match.entry.config):
            return match
    return None


def clear() -> None:
    """Forget all files and answers, so that the next look-up reads the disk again."""
    with _lock:
        _files.clear()
        _ranked.clear()


def matches_in(file: RegistryFile, key: AnyKey, path: Path, label: str) -> list[Match]:
    """The entries of one file that may serve a key, best first."""
    found = [(distance.nearness(entry, key), entry) for entry in file.entries]
    matches = [
        Match(entry, "near" if near else "exact", near, path, label)
        for near, entry in found
        if near is not None
    ]
    return sorted(matches, key=lambda match: (match.nearness, *_order(match.entry, key)))


def _order(entry: AnyEntry, key: AnyKey) -> tuple[object, ...]:
    own, wanted = entry.key.discrete(), key.discrete()
    others = sum(a != b for a, b in zip(own, wanted, strict=True))
    far = distance.log_distance(entry.key, key)
    return (others, far, entry.key.numbers(), own)


def explain(
    key: AnyKey,
    *,
    facts: DeviceFacts,
    config_dir: str | Path | None = None,
    is_legal: IsLegal | None = None,
) -> list[str]:
    """Say place by place why a call gets its config, or why it gets none; reads the disk anew.

    Returns:
        One sentence per place that was asked; for a miss it names the closest entry and the first
        field in which that differs.
    """
    return [
        f"{label}: {path}: {_place_sentence(key, facts, path, label, is_legal)}"
        for label, path in load.search_path(facts.slug, key.family, config_dir)
    ]


def _place_sentence(
    key: AnyKey,
    facts: DeviceFacts,
    path: Path,
    label: str,
    is_legal: IsLegal | None,
) -> str:
    try:
        file = load.read(path)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return reason if reason == files.NO_SUCH_FILE else f"passed over, {reason}"
    if foreign := load.foreign_reason(file, facts, key.family):
        return f"passed over, it {foreign}"
    matches = matches_in(file, key, path, label)
    legal = [m for m in matches if is_legal is None or is_legal(m.entry.config)]
    if legal:
        return f"{legal[0].source} match{_near_words(legal[0], key)}"
    if matches:
        return f"{len(matches)} matching entries, none legal for this call on this device"
    nearest = distance.closest(file.entries, key)
    if nearest is None:
        return "no entries"
    return f"no match; in the closest entry {distance.first_difference(nearest, key)}"


def _near_words(match: Match, key: AnyKey) -> str:
    """At what a near match was measured, and what is known of the loss."""
    if match.source == "exact":
        return ""
    numbers = key.NUMBERS
    measured = [
        f"{name} {value}"
        for name, value in match.entry.key.to_json().items()
        if name in numbers or value != getattr(key, name)
    ]
    if match.nearness != distance.Nearness.MEASURED:
        loss = f"within {distance.REACH} times its lengths, loss not measured"
    elif match.entry.regret is None:
        loss = "between measured lengths, loss not measured (`sage configs regions` prices it)"
    else:
        loss = f"inside its region, where at most {match.entry.regret:.1%} is lost"
    where = f" on {match.entry.evidence.measured_on}" if match.entry.evidence.measured_on else ""
    return f", measured at {', '.join(measured)}{where}; {loss}"


def _rank(key: AnyKey, facts: DeviceFacts, config_dir: str | Path | None) -> tuple[Match, ...]:
    ranked: list[Match] = []
    for label, path in load.search_path(facts.slug, key.family, config_dir):
        file = _file(path, facts, key.family)
        if file is not None:
            ranked += matches_in(file, key, path, label)
    ranked.sort(key=lambda match: match.nearness)  # stable: places stay in their order
    return tuple(ranked)


def _file(path: Path, facts: DeviceFacts, family: str) -> RegistryFile | None:
    """The file's content, read once; `None` where it is absent, damaged or foreign."""
    memo_key = (path, facts.arch, family)
    if memo_key not in _files:
        _files[memo_key] = _read_or_warn(path, facts, family)
    return _files[memo_key]


def _read_or_warn(path: Path, facts: DeviceFacts, family: str) -> RegistryFile | None:
    try:
        file = load.read(path)
    except ConfigError as error:
        if str(error) != f"{path}: {files.NO_SUCH_FILE}":
            logger.warning("%s; its configs are not used (`sage configs check` says more)", error)
        return None
    if reason := load.foreign_reason(file, facts, family):
        logger.warning("%s: %s; its configs are not used", path, reason)
        return None
    return file
