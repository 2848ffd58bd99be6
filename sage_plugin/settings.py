"""The only place that touches environment variables (`ENVs.md` documents each for users).

Values are read at every call of `current()`, which is never on the path of a traced call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OF_CALLS = (
    "SAGE_PLUGIN_KERNEL",
    "SAGE_PLUGIN_VARIANT",
    "SAGE_PLUGIN_CONFIG_DIR",
    "SAGE_PLUGIN_LAUNCH",
    "SAGE_PLUGIN_LINEAR_LAUNCH",
    "SAGE_PLUGIN_PAGED_LAUNCH",
)
_NOTHING_GIVEN: tuple[str | None, ...] = (None,) * len(_OF_CALLS)

# `os.environ.get` takes a microsecond for a variable that is not there; its dict, where it has one
# by this name, a tenth of that.
_KNOWN: dict[bytes | str, object] | None = getattr(os.environ, "_data", None)
_NAMES = frozenset((*_OF_CALLS, *map(os.fsencode, _OF_CALLS)))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; `None` or `False` means that it asks for nothing.

    Attributes:
        kernel: `SAGE_PLUGIN_KERNEL`, replaces `kernel="auto"`.
        variant: `SAGE_PLUGIN_VARIANT`, replaces `variant="auto"`.
        config_dir: `SAGE_PLUGIN_CONFIG_DIR`, searched before the user's and the shipped configs.
        launch: `SAGE_PLUGIN_LAUNCH`, a JSON object that overrides fields of every launch config.
        linear_launch: `SAGE_PLUGIN_LINEAR_LAUNCH`, likewise of those of linears.
        paged_launch: `SAGE_PLUGIN_PAGED_LAUNCH`, likewise of those of paged attention.
        disabled: `SAGE_PLUGIN_DISABLE=1`, every patched call goes to the host's attention.
    """

    kernel: str | None
    variant: str | None
    config_dir: Path | None
    launch: str | None
    linear_launch: str | None
    paged_launch: str | None
    disabled: bool


def current() -> Settings:
    """Read the environment now."""
    return _settings(*of_calls(), os.environ.get("SAGE_PLUGIN_DISABLE"))


def of_calls() -> tuple[str | None, ...]:
    """What calls depend on, as it is now and not yet read: part of the key of a memo of answers."""
    if _KNOWN is not None and _KNOWN.keys().isdisjoint(_NAMES):
        return _NOTHING_GIVEN
    kernel, variant, folder, *launches = map(os.environ.get, _OF_CALLS)
    return kernel, variant, folder and os.path.expanduser(folder.strip()), *launches


def given() -> dict[str, str]:
    """The variables of ours, and Triton's, that are set, by name; for people to read."""
    names = sorted(n for n in os.environ if n.startswith("SAGE_PLUGIN_") or n == "TRITON_INTERPRET")
    return {name: os.environ[name] for name in names if os.environ[name]}


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process, a child that is to see one GPU of several."""
    os.environ.update(variables)


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.lru_cache(maxsize=64)
def _settings(*raw: str | None) -> Settings:
    kernel, variant, folder, launch, linear_launch, paged_launch, disabled = (
        (value or "").strip() for value in raw
    )
    return Settings(
        kernel=kernel or None,
        variant=variant or None,
        config_dir=Path(folder) if folder else None,
        launch=launch or None,
        linear_launch=linear_launch or None,
        paged_launch=paged_launch or None,
        disabled=(disabled or "0").lower() not in ("0", "false", "no", "off"),
    )
