"""Classes like a given processor's or attention module's, whose attention calls come to us instead.

Their methods are copies of the original's in which the way to attention alone is another
(`redirect.py`), and no upstream source is repeated, so that a class keeps working when upstream
changes its arguments.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sage_plugin.plugin.context import STACK, Frame, layer_with
from sage_plugin.plugin.redirect import NoRoomError, reaches_attention, redirected
from sage_plugin.plugin.twin import COPYING, COPYING_MODULES, LAYER, ORIGINAL, ClassMemo

logger = logging.getLogger(__name__)


def _generated(generate: Callable[[type], type | None], original: type) -> type | None:
    try:
        return generate(original)
    except NoRoomError as name:
        logger.warning("%s has no room for another name than %s", original.__qualname__, name)
    except TypeError as error:  # such as a class that may not be inherited from
        logger.warning("%s takes no subclass: %s", original.__qualname__, error)
    return None


def _generate(original: type) -> type | None:
    names = {name for cls in original.__mro__ for name in vars(cls)}
    if "__call__" not in names or not any(_attends(original, name) for name in names):
        return None
    kind, name = _writing_through(type(original)), f"Sage{original.__name__}"
    generated = _subclass(original, kind, name, "__call__", _called, COPYING)
    _register_metadata(original, generated)
    return generated


def _generate_module(original: type) -> type | None:
    if not _attends(original, "forward"):
        return None
    return _subclass(
        original,
        type(original),
        original.__name__,
        "forward",
        _entered,
        COPYING_MODULES,
    )


def _attends(cls: type, name: str) -> bool:
    """Whether a method of a class reaches attention, by itself or by `super`."""
    for base in cls.__mro__:
        if name in vars(base):
            function = _function_of(vars(base)[name])
            if function is not None and reaches_attention(function):
                return True
            if function is None or "super" not in function.__code__.co_names:
                return False
    return False


patched_class = ClassMemo(functools.partial(_generated, _generate))
"""Makes the subclass of a processor's class that calls our attention, once per class; `None` where
it makes no attention call that can be redirected."""
patched_module_class = ClassMemo(functools.partial(_generated, _generate_module))
"""The same of an attention module's class; `None` where its `forward` looks no function up."""


def _subclass(
    original: type,
    kind: type[type],
    name: str,
    entry: str,
    entrance: Callable[..., Any],
    copying: dict[str, Any],
) -> type:
    """A subclass with our copies of methods, each before the method that it is a copy of.

    Those of a base class lie in a class of ours before it, where `super` comes by.
    """
    namespace = _copies(original) | copying
    namespace |= {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        ORIGINAL: original,
    }
    if name == original.__name__:
        namespace["__qualname__"] = original.__qualname__
    bases = ((cls, _copies(cls)) for cls in original.__mro__[1:])
    mixed_in = (type(cls)(cls.__name__, (cls,), own) for cls, own in bases if own)
    made: type = kind(name, (original, *mixed_in), namespace)
    type.__setattr__(made, entry, entrance(getattr(made, entry)))
    return made


@functools.lru_cache(maxsize=64)
def _writing_through(kind: type[type]) -> type[type]:
    """A metaclass of ours: what is set on a class of it is set on the original."""

    def __setattr__(cls: type, name: str, value: object) -> None:
        original = vars(cls).get(ORIGINAL)
        if original is None or name.startswith("_abc_"):
            kind.__setattr__(cls, name, value)
        else:
            setattr(original, name, value)

    return type(kind.__name__, (kind,), {"__setattr__": __setattr__})


def _copies(cls: type) -> dict[str, Any]:
    """Copies of the methods that a class itself has and that reach attention."""
    made: dict[str, Any] = {}
    for name, value in vars(cls).items():
        function = _function_of(value)
        if function is not None and reaches_attention(function):
            copied = redirected(function)
            made[name] = copied if value is function else type(value)(copied)
    return made


def _function_of(value: object) -> types.FunctionType | None:
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return function if isinstance(function, types.FunctionType) else None


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
