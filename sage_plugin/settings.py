"""The only reader of environment variables (`ENVs.md` documents each for users).

Values are read at every call of `current()`, which is never on the path of a traced call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; `None` or `False` means that it asks for nothing.

    Attributes:
        kernel: `SAGE_PLUGIN_KERNEL`, replaces `kernel="auto"`.
        variant: `SAGE_PLUGIN_VARIANT`, replaces `variant="auto"`.
        config_dir: `SAGE_PLUGIN_CONFIG_DIR`, searched before the user's and the shipped configs.
        launch: `SAGE_PLUGIN_LAUNCH`, a JSON object that overrides fields of every launch config.
        disabled: `SAGE_PLUGIN_DISABLE=1`, every patched call goes to the host's attention.
    """

    kernel: str | None
    variant: str | None
    config_dir: Path | None
    launch: str | None
    disabled: bool


def current() -> Settings:
    """Read the environment now."""
    config_dir = _text("SAGE_PLUGIN_CONFIG_DIR")
    return Settings(
        kernel=_text("SAGE_PLUGIN_KERNEL"),
        variant=_text("SAGE_PLUGIN_VARIANT"),
        config_dir=Path(os.path.expanduser(config_dir)) if config_dir else None,
        launch=_text("SAGE_PLUGIN_LAUNCH"),
        disabled=(_text("SAGE_PLUGIN_DISABLE") or "0").lower() not in ("0", "false", "no", "off"),
    )


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def _text(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None
