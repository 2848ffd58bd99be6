"""Less work for Triton's CPU interpreter: the types of values are made once, not once a value.

A kernel in the interpreter spends little time on numbers. Most goes to types that describe them:
a tuple computes the type of itself when it is made, a block computes its name, a tensor wraps its
shape anew. `make_types_once()` has them computed on demand or kept. No value changes.
"""

from __future__ import annotations

import inspect
import math
from typing import Any


def make_types_once(interpreter: Any) -> None:
    """Patch the language and the interpreter of the installed Triton; call it once."""
    import triton.language as tl

    _unwrap_quickly(tl.core)
    _name_tuples_on_demand(tl.core)
    _keep_block_types(tl.core)
    _keep_shapes(tl.core)
    _keep_numpy_types(interpreter, tl)
    _call_builtins_directly(interpreter)
    _list_builtins_once(interpreter, tl)
    _compare_quickly(interpreter.TritonSemantic, tl)


def _unwrap_quickly(core: Any) -> None:
    stock, constexpr = core._unwrap_if_constexpr, core.constexpr
    containers = (list, tuple, core.tuple)

    def unwrap(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return stock(value) if isinstance(value, containers) else value

    core._unwrap_if_constexpr = unwrap


def _name_tuples_on_demand(core: Any) -> None:
    """Types of tuples and of compile-time constants, which nobody asks for in the interpreter."""
    made = core.tuple.__init__

    def on_demand(compute: Any) -> property:
        def get(self: Any) -> Any:
            kind = self.__dict__.get("_kind")
            if kind is None:
                kind = self.__dict__["_kind"] = compute(self)
            return kind

        return property(get, lambda self, kind: self.__dict__.__setitem__("_kind", kind))

    def new_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is not None:
            made(self, args, type)
        else:
            self.values = list(args)

    def new_constexpr(self: Any, value: Any) -> None:
        while isinstance(value, core.constexpr):
            value = value.value
        self.value = value

    core.tuple.type = on_demand(lambda self: core._type_for_tuple_values(self.values))
    core.tuple.__init__ = new_tuple
    core.constexpr.type = on_demand(lambda self: core.constexpr_type(self.value))
    core.constexpr.__init__ = new_constexpr


def _keep_block_types(core: Any) -> None:
    stock, kept = core.block_type.__init__, {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else core._unwrap_if_constexpr(shape)
        # Pointer types are made anew for each launch, and are equal by more than their name.
        key = (element_ty.name, getattr(element_ty, "const", None), *sizes)
        if key not in kept:
            stock(self, element_ty, shape)
            kept[key] = dict(self.__dict__)
        self.__dict__.update(kept[key])

    core.block_type.__init__ = init


def _keep_shapes(core: Any) -> None:
    """The shape and the size of a tensor, wrapped once for all tensors of a shape."""
    kept: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in kept:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            kept[sizes] = (shape, core.constexpr(math.prod(sizes)))
        self.shape, self.numel = kept[sizes]

    core.tensor.__init__ = init


def _keep_numpy_types(interpreter: Any, tl: Any) -> None:
    stock, kept = interpreter._get_np_dtype, {}

    def of(kind: Any) -> Any:
        name = "pointer" if kind.scalar.is_ptr() else kind.scalar.name
        if name not in kept:
            kept[name] = stock(kind)
        return kept[name]

    interpreter._get_np_dtype = of
    integers = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
    tl.dtype.is_int = lambda self: self.name in integers


def _call_builtins_directly(interpreter: Any) -> None:
    """Without a new dictionary of the keywords, and without the check that they are complete."""
    semantics: dict[int, Any] = {}

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = semantics.setdefault(id(builder), interpreter.TritonSemantic(builder))
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*args, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _list_builtins_once(interpreter: Any, tl: Any) -> None:
    """The members that a launch replaces, listed once and not at each launch."""
    listed: dict[int, list[tuple[str, Any]]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in listed:
            members = inspect.getmembers(package)
            listed[id(package)] = [one for one in members if tl.core.is_builtin(one[1])]
        for name, member in listed[id(package)]:
            if getattr(package, name) is member:  # else another module of this launch was before us
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _compare_quickly(semantic: Any, tl: Any) -> None:
    """Operands of one type or shape, which most are, need no conversion and no broadcast."""
    equal, broadcast = tl.dtype.__eq__, semantic.broadcast_impl_value

    def same_type(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def same_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    tl.dtype.__eq__ = same_type
    semantic.broadcast_impl_value = same_shape
