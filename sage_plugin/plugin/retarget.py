"""Classes like a given processor's or attention module's, whose attention calls come to us instead.

Their methods are copies of the original's in which the way to attention alone is another
(`redirect.py`), and no upstream source is repeated, so that a class keeps working when upstream
changes its arguments.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sage_plugin.plugin.context import STACK, Frame, LayerContext, layer_with
from sage_plugin.plugin.redirect import NoRoomError, reaches_attention, redirected

logger = logging.getLogger(__name__)

LAYER = "_sage_layer"
"""Where an attention module has its `LayerContext`."""
ORIGINAL = "_sage_original"

_lock = threading.RLock()
_processors: dict[type, type | None] = {}
_modules: dict[type, type | None] = {}
_plain: dict[type, type] = {}


def patched_class(original: type) -> type | None:
    """The subclass of a processor's class that calls our attention; made once per class.

    Args:
        original: class of an attention processor, not one that this function made.

    Returns:
        The subclass, or `None` where the class makes no attention call that can be redirected.
    """
    with _lock:
        if original not in _processors:
            _processors[original] = _generated(_generate, original)
        return _processors[original]


def patched_module_class(original: type) -> type | None:
    """The subclass of an attention module's class that calls our attention; made once per class.

    Args:
        original: class of a module of transformers, not one that this function made.

    Returns:
        The subclass, or `None` where its `forward` looks no attention function up.
    """
    with _lock:
        if original not in _modules:
            _modules[original] = _generated(_generate_module, original)
        return _modules[original]


def generated_class(obj: object) -> type | None:
    """The class of ours that an object is of, be it under one that somebody put on top of it."""
    return next((cls for cls in type(obj).__mro__ if ORIGINAL in vars(cls)), None)


def original_class(obj: object) -> type:
    """The class that a processor, or an attention module, has unpatched."""
    original: type = getattr(type(obj), ORIGINAL, type(obj))
    return original


def plain_class(cls: type) -> type:
    """A class without ours in it: that which it was made of, or the same on top of that.

    `fully_shard` and parametrizations give a module a subclass of the class that it has.
    """
    if ORIGINAL in vars(cls):
        original: type = vars(cls)[ORIGINAL]
        return original
    if not hasattr(cls, ORIGINAL):
        return cls
    with _lock:
        if cls not in _plain:
            own = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
            _plain[cls] = type(cls)(cls.__name__, tuple(map(plain_class, cls.__bases__)), own)
        return _plain[cls]


def layer_of(module: object) -> LayerContext | None:
    """The layer that an attention module is patched as; `None` for any other object."""
    layer: LayerContext | None = getattr(module, "__dict__", {}).get(LAYER)
    return layer


def _generated(generate: Callable[[type], type | None], original: type) -> type | None:
    try:
        return generate(original)
    except NoRoomError as name:
        logger.warning("%s has no room for another name than %s", original.__qualname__, name)
        return None


def _generate(original: type) -> type | None:
    methods = dict(_methods(original))
    if not methods or not any("__call__" in vars(cls) for cls in original.__mro__):
        return None
    entrance = _called(methods.get("__call__", original.__call__))
    generated = _subclass(original, f"Sage{original.__name__}", {**methods, "__call__": entrance})
    _register_metadata(original, generated)
    return generated


def _generate_module(original: type) -> type | None:
    forward = getattr(original, "forward", None)
    if not isinstance(forward, types.FunctionType) or not reaches_attention(forward):
        return None
    methods = dict(_methods(original))
    entrance = _entered(methods.get("forward", forward))
    namespace = {**methods, "forward": entrance, "__qualname__": original.__qualname__}
    return _subclass(original, original.__name__, namespace)


def _subclass(original: type, name: str, namespace: dict[str, Any]) -> type:
    namespace |= {
        "__module__": original.__module__,
        "__reduce_ex__": _reduce_as_original,
        "__doc__": original.__doc__,
        ORIGINAL: original,
    }
    return type(original)(name, (original,), namespace)


def _methods(original: type) -> Iterator[tuple[str, Any]]:
    """Copies of the methods that reach attention."""
    seen: set[str] = set()
    for cls in original.__mro__:
        for name, value in vars(cls).items():
            if name in seen:
                continue
            seen.add(name)
            bound = isinstance(value, staticmethod | classmethod)
            function = value.__func__ if bound else value
            if isinstance(function, types.FunctionType) and reaches_attention(function):
                copied = redirected(function)
                yield name, type(value)(copied) if bound else copied


# `wraps` matters: diffusers drops keyword arguments that `inspect.signature` does not show.


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    """The entrance of a processor, which leaves the layer of the module that calls it."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        caller = args[0] if args else kwargs.get("attn")
        layer = vars(caller).get(LAYER) if isinstance(caller, nn.Module) else None
        if layer is None or layer.processor is not self:  # made by `type(processor)()`, or lent
            layer = None if torch.compiler.is_compiling() else layer_with(self)
        frames = STACK.frames
        frames.append(Frame(layer))
        try:
            return call(self, *args, **kwargs)
        finally:
            frames.pop()

    return __call__


def _entered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The entrance of a module that attends itself, which leaves its own layer."""

    @functools.wraps(forward)
    def entrance(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        frames = STACK.frames
        frames.append(Frame(vars(self).get(LAYER), bool(kwargs.get("output_attentions"))))
        try:
            return forward(self, *args, **kwargs)
        finally:
            frames.pop()

    return entrance


def _reduce_as_original(self: object, protocol: object) -> tuple[Any, ...]:
    """A copy or a pickle of what is patched is unpatched."""
    state = {key: value for key, value in vars(self).items() if key != LAYER}
    return object.__new__, (plain_class(type(self)),), state


def _register_metadata(original: type, generated: type) -> None:
    """Enter the new class where diffusers' layer skipping looks for the exact class."""
    helpers = sys.modules.get("diffusers.hooks._helpers")
    if helpers is None:
        return
    registry = helpers.AttentionProcessorRegistry
    try:
        registry.register(generated, registry.get(original))
    except ValueError:  # the original is not there either
        return
