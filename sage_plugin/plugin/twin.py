"""What is patched, and what it was made of: classes of ours, and twins of processors.

A twin is another object with the very `__dict__` of the original, of a class that `retarget.py`
made. Copies and pickles of either, and of a patched module, are unpatched.
"""

from __future__ import annotations

import collections
import copy
import operator
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from sage_plugin.plugin.context import LayerContext, layer_with

LAYER = "_sage_layer"
"""Where an attention module has its `LayerContext`."""
ORIGINAL = "_sage_original"
"""Where a class of ours has the class that it was made of."""
KEPT_CLASSES = 256
"""Classes of ours that are kept when nobody uses them, about 4 KB each."""
HEAP_TYPE = 1 << 9
"""CPython's flag of classes that were made at run time."""


def layer_of(module: object) -> LayerContext | None:
    """The layer that an attention module is patched as; `None` for any other object."""
    layer: LayerContext | None = getattr(module, "__dict__", {}).get(LAYER)
    return layer


def generated_class(obj: object) -> type | None:
    """The class of ours that an object is of, be it under one that somebody put on top of it."""
    return next((cls for cls in type(obj).__mro__ if ORIGINAL in vars(cls)), None)


def original_class(obj: object) -> type:
    """The class that a processor, or an attention module, has unpatched."""
    original: type = getattr(type(obj), ORIGINAL, type(obj))
    return original


class ClassMemo:
    """Makes a class of each class once, and keeps neither alive for good.

    What was made lives as long as somebody uses it, and the latest ones longer, so that a model
    that is patched again gets the class that its compiled graphs know.

    Args:
        make: the class for another one, or `None` if there is none.
    """

    def __init__(self, make: Callable[[type], type | None]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._known: weakref.WeakKeyDictionary[type, Callable[[], type | None]]
        self._known = weakref.WeakKeyDictionary()
        self._latest: collections.deque[type] = collections.deque(maxlen=KEPT_CLASSES)

    def __call__(self, cls: type) -> type | None:
        """Return the class that was made of a class, or make it."""
        with self._lock:
            found = self._known.get(cls)
            if found is not None and (found is _no_class or found() is not None):
                return found()
            made = self._make(cls)
            self._known[cls] = _no_class if made is None else weakref.ref(made)
            if made is not None:
                self._latest.append(made)
            return made


def _no_class() -> None:
    """Stand for the class of one of which none can be made."""


def plain_class(cls: type) -> type:
    """A class without ours in it: that which it was made of, or the same on top of that.

    `fully_shard` and parametrizations give a module a subclass of the class that it has.
    """
    if ORIGINAL in vars(cls):
        original: type = vars(cls)[ORIGINAL]
        return original
    return (_without_ours(cls) or cls) if hasattr(cls, ORIGINAL) else cls


@ClassMemo
def _without_ours(cls: type) -> type:
    own = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    bases = tuple(map(plain_class, cls.__bases__))
    return types.new_class(cls.__name__, bases, exec_body=lambda names: names.update(own))


def make_plain(processor: object) -> None:
    """Give a processor of ours the class of its original, whose `__dict__` it keeps."""
    if generated_class(processor) is not None:
        object.__setattr__(processor, "__class__", plain_class(type(processor)))


def lies_in_dict(processor: object) -> bool:
    """Whether all that an object holds lies in its `__dict__`, as Python's own classes have it."""
    classes = type(processor).__mro__[:-1]
    members = (value for cls in classes for value in vars(cls).values())
    written_in_c = any(not cls.__flags__ & HEAP_TYPE for cls in classes)
    slots = any(isinstance(value, types.MemberDescriptorType) for value in members)
    return hasattr(processor, "__dict__") and not (slots or written_in_c)


def twin_of(processor: object, cls: type) -> object:
    """Another object of a class, with the same `__dict__`."""
    twin: object = object.__new__(cls)
    object.__setattr__(twin, "__dict__", vars(processor))
    return twin


def original_of(processor: object) -> object:
    """What a processor is unpatched: itself, or what a twin of ours was made of."""
    owner = layer_with(processor)
    if owner is not None:
        return owner.original
    if generated_class(processor) is None:
        return processor
    return twin_of(processor, plain_class(type(processor)))


COPYING: dict[str, Callable[..., Any]] = {
    "__copy__": lambda self: copy.copy(original_of(self)),
    "__deepcopy__": lambda self, memo: copy.deepcopy(original_of(self), memo),
    "__reduce_ex__": lambda self, protocol: (operator.getitem, ([original_of(self)], 0)),
}
"""Methods of a twin: a copy is one of the original, by its own methods, and one object where layers
share it."""


def _reduce_as_original(self: object, protocol: object) -> tuple[Any, ...]:
    """A copy or a pickle of a patched module is unpatched."""
    state = {key: value for key, value in vars(self).items() if key != LAYER}
    return object.__new__, (plain_class(type(self)),), state


COPYING_MODULES: dict[str, Callable[..., Any]] = {"__reduce_ex__": _reduce_as_original}
