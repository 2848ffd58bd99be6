"""What of transformers is changed while continuous batching runs on our attention.

Our function is known by a name that the manager lets through; the gate in front of tables of pages
opens for that name; and the class of caches makes those of 8 bits where a handle asks for them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from sage_plugin.plugin.hosts.eight_bit_pages import CACHE, FULL, eight_bit_cache

NAME = "sage_plugin_flash"
"""With "flash" in it, which the manager asks for; no package or kernel of that name is loaded."""

OLDER = f"paged|{NAME}"
"""As releases before 5.23 spell what they let through; later ones would take the prefix off."""

FIELD = "_attn_implementation_internal"
"""What a configuration keeps the name in: `set_attn_implementation` would look for a package."""

GATE = (
    "transformers.generation.continuous_batching.initialization",
    "ensure_decode_fast_path_is_available",
)
"""Turns tables of pages off, but for FlashAttention 2 and 3 on CUDA."""

MAKER = ("transformers.generation.continuous_batching.continuous_api", "PagedAttentionCache")
"""Where the manager finds the class of its cache."""

DtypeOf = Callable[[object], torch.dtype | None]
"""What the caches of a model shall hold, by its configuration; `None` for its own type."""


def enter(attention: Callable[..., Any], dtype_of: DtypeOf) -> str:
    """Register the function, open the gate and stand in for the class of caches.

    Args:
        attention: our attention function.
        dtype_of: asked for each cache that is made.

    Returns:
        The name of the function, as this release lets it through.
    """
    library: Any = importlib.import_module("transformers")
    cache: Any = importlib.import_module(CACHE)
    taken = inspect.signature(cache.PagedAttentionCache.update).parameters
    name = OLDER if "read_index" in taken else NAME
    masks = library.AttentionMaskInterface
    library.AttentionInterface.register(name, attention)
    masks.register(name, masks()["flash_attention_2"])
    _replace(*GATE, _opened)
    _replace(*MAKER, functools.partial(_making, dtype_of))
    return name


def leave() -> None:
    """Put back what stands in for the gate and for the class of caches."""
    for module, name in (GATE, MAKER):
        found = _found(module)
        ours: Any = getattr(found, name, None)
        if getattr(ours, "sage_plugin", False):
            setattr(found, name, ours.__wrapped__)


def _found(module: str) -> Any:  # noqa: ANN401
    """A module; `None` in releases without it, which pack all batches alike."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _replace(module: str, name: str, stand_in: Callable[[Any], Any]) -> None:
    """Put something in the place of what a module has by a name, once."""
    found = _found(module)
    original = getattr(found, name, None)
    if original is not None and not getattr(original, "sage_plugin", False):
        ours = stand_in(original)
        ours.sage_plugin = True
        setattr(found, name, ours)


def _opened(gate: Callable[..., None]) -> Callable[..., None]:
    """The gate, which lets our name through where all of a model's layers have tables of pages."""

    @functools.wraps(gate)
    def opened(config: Any, cb_config: Any, *rest: object) -> None:  # noqa: ANN401
        if getattr(config, FIELD, None) not in (NAME, OLDER):
            gate(config, cb_config, *rest)
            return
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = [FULL if getattr(config, "sliding_window", None) is None else "sliding"]
        if any(kind != FULL for kind in kinds):
            cb_config.max_blocks_per_request = 0

    return opened


def _making(dtype_of: DtypeOf, original: Any) -> Callable[..., Any]:  # noqa: ANN401
    """The class of caches, which makes those of 8 bits where they are asked for."""

    @functools.wraps(original, updated=())
    def made(*given: Any, **others: Any) -> Any:  # noqa: ANN401
        config = given[0] if given else others.get("config")
        dtype = dtype_of(config)
        if dtype is None:
            return original(*given, **others)
        return eight_bit_cache(original, dtype, lambda: dtype_of(config) == dtype, *given, **others)

    return made
