"""Classes like a given processor's or attention module's, whose attention calls come to us instead.

The methods are the original code objects over other globals: a copy of their module's, in which
`dispatch_attention_fn`, `scaled_dot_product_attention` and transformers' table are ours. No
upstream source is repeated, so that a class keeps working when upstream changes its arguments.

Dynamo looks a function's globals up in `sys.modules[globals["__name__"]]`; with a plain dict it
would read the original module and silently compile the original attention. The copy is therefore a
real module under a private name.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sage_plugin.plugin import route
from sage_plugin.plugin.context import STACK, Frame, LayerContext
from sage_plugin.plugin.hosts.transformers_dispatch import TABLE, Interfaces

DISPATCH = "dispatch_attention_fn"
SDPA = "scaled_dot_product_attention"
TARGETS = frozenset({DISPATCH, SDPA, TABLE})
"""Names by which attention is reached: diffusers', torch's, and transformers'."""
LAYER = "_sage_layer"
ORIGINAL = "_sage_original"
PRIVATE = "sage_plugin._retarget"

_lock = threading.RLock()
_processors: dict[type, type | None] = {}
_modules: dict[type, type | None] = {}
_shadows: dict[int, _Shadow] = {}


def patched_class(original: type) -> type | None:
    """The subclass of a processor's class that calls our attention; made once per class.

    Args:
        original: class of an attention processor, not one that this function made.

    Returns:
        The subclass, or `None` where the class makes no attention call that can be redirected.
    """
    with _lock:
        if original not in _processors:
            _processors[original] = _generate(original)
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
            _modules[original] = _generate_module(original)
        return _modules[original]


def refresh() -> None:
    """Take over what changed in the retargeted modules since the last patch."""
    with _lock:
        for shadow in _shadows.values():
            shadow.refresh()


def original_class(processor: object) -> type:
    """The class that a processor, or an attention module, has unpatched."""
    original: type = getattr(type(processor), ORIGINAL, type(processor))
    return original


def layer_of(processor: object) -> LayerContext | None:
    """The layer that a processor of ours belongs to; `None` for any other object."""
    layer: LayerContext | None = getattr(processor, LAYER, None)
    return layer


def _generate(original: type) -> type | None:
    methods = dict(_methods(original))
    if not methods or not any("__call__" in vars(cls) for cls in original.__mro__):
        return None
    home = sys.modules[_scope_name(next(iter(methods.values())))]
    name = f"Sage{original.__name__}"
    namespace = _namespace(original, methods, "__call__") | {"__module__": home.__name__}
    generated = type(original)(name, (original,), namespace)
    setattr(home, name, generated)
    _register_metadata(original, generated)
    return generated


def _generate_module(original: type) -> type | None:
    forward = getattr(original, "forward", None)
    if not isinstance(forward, types.FunctionType) or not _reaches(forward, set()):
        return None
    methods = dict(_methods(original))
    namespace = _namespace(original, methods, "forward") | {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    return type(original)(original.__name__, (original,), namespace)


def _namespace(original: type, methods: dict[str, Any], entry: str) -> dict[str, Any]:
    """What our subclass of a class has: the copied methods, and the entrance that leaves its layer.

    An instance that `type(processor)()` makes belongs to no layer.
    """
    return {
        **methods,
        entry: _entering(methods.get(entry, getattr(original, entry))),
        "__reduce_ex__": _reduce_as_original,
        "__doc__": original.__doc__,
        ORIGINAL: original,
        LAYER: None,
    }


def _methods(original: type) -> Iterator[tuple[str, Any]]:
    """The methods that reach attention, over the copied globals."""
    seen: set[str] = set()
    for cls in original.__mro__:
        for name, value in vars(cls).items():
            if name in seen:
                continue
            seen.add(name)
            bound = isinstance(value, staticmethod | classmethod)
            function = value.__func__ if bound else value
            if isinstance(function, types.FunctionType) and _reaches(function, set()):
                copied = _shadow(function.__globals__).retargeted(function)
                yield name, type(value)(copied) if bound else copied


def _scope_name(method: Any) -> str:  # noqa: ANN401
    name: str = getattr(method, "__func__", method).__globals__["__name__"]
    return name


def _entering(call: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` matters: diffusers drops keyword arguments that `inspect.signature` does not show.
    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        frames = STACK.frames
        frames.append(Frame(layer_of(self)))
        try:
            return call(self, *args, **kwargs)
        finally:
            frames.pop()

    return __call__


def _reduce_as_original(self: object, protocol: object) -> tuple[Any, ...]:
    """A copy or a pickle of a patched processor is an unpatched one."""
    state = {key: value for key, value in vars(self).items() if key != LAYER}
    return object.__new__, (original_class(self),), state


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


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _reaches(function: types.FunctionType, seen: set[types.CodeType]) -> bool:
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    names = _names(function.__code__)
    if names & TARGETS:
        return True
    helpers = (*_helpers(function, names), *_enclosed(function))
    return any(_reaches(helper, seen) for helper in helpers)


def _helpers(function: types.FunctionType, names: set[str]) -> Iterator[types.FunctionType]:
    """Plain functions of the same module that a function names."""
    scope = function.__globals__
    for name in names:
        value = scope.get(name)
        if isinstance(value, types.FunctionType) and value.__globals__ is scope:
            yield value


def _enclosed(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Functions that a decorator's wrapper calls."""
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(value, types.FunctionType):
            yield value


class _Forwarding:
    """Stands in for a module: everything comes from it, but for the names in `ours`."""

    def __init__(self, module: types.ModuleType, ours: dict[str, Any]) -> None:
        self._module = module
        self._ours = ours

    def __getattr__(self, name: str) -> object:
        ours = self._ours
        return ours[name] if name in ours else getattr(self._module, name)


_FUNCTIONAL = _Forwarding(torch.nn.functional, {SDPA: route.sdpa})
_NN = _Forwarding(torch.nn, {"functional": _FUNCTIONAL})
_TORCH = _Forwarding(torch, {"nn": _NN})


class _Shadow:
    """The copy of one module's globals in which attention is ours."""

    def __init__(self, scope: dict[str, Any]) -> None:
        name = f"{PRIVATE}.{scope['__name__']}"
        if name in sys.modules:
            name = f"{name}_{len(_shadows)}"
        self.scope = scope
        self.module = types.ModuleType(name)
        self.functions: dict[types.FunctionType, types.FunctionType] = {}
        self.tables: dict[int, Interfaces] = {}
        self.spelled_out = False  # somebody writes torch.nn.functional.scaled_dot_product_attention
        sys.modules[name] = self.module
        self.refresh()

    def refresh(self) -> None:
        """Take over what changed in the original module since the last patch."""
        kept = ("__name__", "__file__")  # two modules of one file would confuse `inspect`
        for key, value in self.scope.items():
            if key not in kept:
                self.module.__dict__[key] = self._ours(key, value)

    def retargeted(self, function: types.FunctionType) -> types.FunctionType:
        """The function over the copied globals; helpers that reach attention come along."""
        if function not in self.functions:
            self.functions[function] = _over(function, self.module.__dict__)
            names = _names(function.__code__)
            self.spelled_out |= SDPA in names and "functional" in names
            for helper in _helpers(function, names):
                if _reaches(helper, set()):
                    self.retargeted(helper)
            self.refresh()
        return self.functions[function]

    def _ours(self, key: str, value: object) -> object:
        if key == DISPATCH and callable(value):
            return route.dispatch_instead_of(value)
        if key == TABLE:
            return self.tables.setdefault(id(value), Interfaces(value))
        if value is torch.nn.functional:
            return _FUNCTIONAL
        if value is torch.nn.functional.scaled_dot_product_attention:
            return route.sdpa
        if self.spelled_out and value is torch.nn:
            return _NN
        if self.spelled_out and value is torch:
            return _TORCH
        if isinstance(value, types.FunctionType):
            return self.functions.get(value, value)
        return value


def _shadow(scope: dict[str, Any]) -> _Shadow:
    if id(scope) not in _shadows:
        _shadows[id(scope)] = _Shadow(scope)  # which holds the scope, so that its id stays taken
    return _shadows[id(scope)]


def _over(function: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    enclosed = {inner for inner in _enclosed(function) if _reaches(inner, set())}

    def ours(cell: types.CellType) -> types.CellType:
        if not enclosed or cell.cell_contents not in enclosed:
            return cell
        inner: types.FunctionType = cell.cell_contents
        return types.CellType(_shadow(inner.__globals__).retargeted(inner))

    closure = None if function.__closure__ is None else tuple(map(ours, function.__closure__))
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    copied.__qualname__ = function.__qualname__
    copied.__doc__ = function.__doc__
    copied.__dict__.update(function.__dict__)
    return copied
