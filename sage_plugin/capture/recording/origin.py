"""Where a capture comes from: the model's class, its config, and the versions that ran it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from dataclasses import dataclass

from torch import nn

from sage_plugin import __version__

_PACKAGES = ("torch", "diffusers", "transformers", "safetensors")
_HASH_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """The part of a manifest line that is the same for every call of a component."""

    model_class: str
    config_hash: str
    versions: dict[str, str]


def origin_of(model: nn.Module) -> Origin:
    """Describe a component.

    Example:
        >>> from torch import nn
        >>> origin_of(nn.Linear(1, 1)).model_class
        'Linear'
    """
    return Origin(type(model).__name__, _config_hash(model), _versions())


def _config_hash(model: nn.Module) -> str:
    """Equal for equal configs, wherever the files lie; empty for a model without a config."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        config = to_dict()
    if not isinstance(config, dict):
        return ""
    facts = {
        str(key): value
        for key, value in config.items()
        if not str(key).startswith("_") and key != "transformers_version"
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def _versions() -> dict[str, str]:
    versions = {"sage_plugin": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = str(getattr(sys.modules[name], "__version__", ""))
    return versions
