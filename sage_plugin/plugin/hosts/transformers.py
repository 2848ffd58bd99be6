"""What a model of transformers holds: attention modules, which look their function up in a table.

Such a module becomes an instance of a subclass of its class, whose `forward` finds our functions in
the table (`transformers_dispatch.py`). Its configuration, which other models may share, is left
alone. Nothing of transformers is imported here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from sage_plugin.plugin import retarget
from sage_plugin.plugin.context import LayerContext, layer_path
from sage_plugin.plugin.redirect import NO_CALL
from sage_plugin.plugin.twin import LAYER, generated_class, layer_of, original_class, plain_class


def is_model(obj: object) -> bool:
    """Whether an object is a module of transformers.

    Example:
        >>> is_model(nn.Linear(2, 2))
        False
    """
    return any(cls.__module__.split(".")[0] == "transformers" for cls in type(obj).__mro__)


def attention_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module, object]]:
    """Path and module, twice, of every attention module in a model: it is its own processor.

    In a model of transformers that may be a module of somebody else's, as checkpoints that bring
    their code have it; outside of one, modules of transformers alone.
    """
    anybodys = is_model(root)
    for path, module in root.named_modules():
        original = original_class(module)
        ours = anybodys and not original.__module__.startswith("torch.")
        if (ours or is_model(module)) and retarget.patched_module_class(original):
            yield layer_path(path), module, module


def swap(layer: LayerContext) -> str | None:
    """Make a layer's module one of our subclass.

    Returns:
        Why it cannot be, as where its `forward` is not the class's; `None` where it is.
    """
    module = layer.attention
    if module is None:
        return NO_CALL
    generated = retarget.patched_module_class(original_class(module))
    if generated is None or not _rebind(module, _forward):
        return NO_CALL
    module.__class__ = generated
    vars(module)[LAYER] = layer
    layer.original, layer.processor = original_class(module), generated
    return None


def put_back(layer: LayerContext) -> None:
    """Undo `swap`; a class that somebody else gave the module since is left, less ours in it."""
    module, ours = layer.attention, layer.processor
    layer.processor = None
    if module is None or ours is None:
        return
    if layer_of(module) is layer:
        original: Any = original_class(module)
        _rebind(module, original.forward)
        module.__class__ = plain_class(type(module))
        del vars(module)[LAYER]


def standing(layer: LayerContext) -> object:
    """What stands in the layer's place: our class of the module, `None` once it has another."""
    return generated_class(layer.attention)


def found(layer: LayerContext) -> object:
    """What there is to patch in a layer's place: the module, of whatever class it is now."""
    return layer.attention


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """The `forward` of the class that a module has, and that a copy of it has."""
    return type(module).forward(module, *args, **kwargs)


def _rebind(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Put another function where hooks keep the `forward` that they found in a module, bound to it.

    Returns:
        Whether a call of the module comes to it, or to the class, and not to somebody's function.
    """
    original = original_class(module)
    known = [getattr(cls, "forward", None) for cls in (original, type(module))]
    held = [
        (holder, name)
        for holder, name in _holders(module)
        if isinstance(bound := vars(holder).get(name), types.MethodType)
        and bound.__self__ is module
        and bound.__func__ in (*known, _forward)
    ]
    for holder, name in held:
        setattr(holder, name, types.MethodType(forward, module))
    return bool(held) or "forward" not in vars(module)


def _holders(module: nn.Module) -> Iterator[tuple[object, str]]:
    """Where a bound `forward` may lie: in the module, and in hooks of accelerate and diffusers."""
    yield module, "forward"
    yield module, "_old_forward"
    for reference in getattr(vars(module).get("_diffusers_hook"), "_fn_refs", ()):
        yield reference, "forward"
        yield reference, "original_forward"
