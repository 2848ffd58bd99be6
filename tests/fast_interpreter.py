"""Less work for Triton's CPU interpreter: the types of values are made once, not once a value.

A kernel in the interpreter spends little time on numbers. Most goes to types that describe them:
a tuple computes the type of itself when it is made, a block computes its name, a tensor wraps its
shape anew. `make_types_once()` has them computed on demand or kept. No value changes.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np


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
    _make_handles_quickly(interpreter, tl)
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


def _make_handles_quickly(interpreter: Any, tl: Any) -> None:
    """Arrays and their types, checked in one step; numpy spends more on a view than on a copy."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        bits = getattr(dtype, "primitive_bitwidth", 64)  # of a pointer
        if data.itemsize * 8 > max(bits, 8):
            raise ValueError(f"an array of {data.dtype} holds no {dtype}")
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        out, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        wanted = interpreter._get_np_dtype(kind)
        return handle(out.astype(wanted) if out.itemsize > wanted.itemsize else out, kind)

    def broadcast(self: Any, arg: Any, shape: Any) -> Any:
        out = np.empty(tuple(shape), arg.data.dtype)
        out[...] = arg.data
        return handle(out, arg.dtype.scalar)

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        return handle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    handle.__init__ = init
    builder.binary_op, builder.create_broadcast = binary_op, broadcast
    builder.create_expand_dims = expand_dims


def _compare_quickly(semantic: Any, tl: Any) -> None:
    """Operands of one type or shape, which most are, need no conversion and no broadcast."""
    equal, broadcast = tl.dtype.__eq__, semantic.broadcast_impl_value
    check = semantic.binary_op_type_checking_impl
    wide = {"int32": range(-(2**31), 2**31), "int64": range(-(2**63), 2**63)}

    def same_type(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def same_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def stays(kind: Any, number: Any) -> bool:
        """Whether an operation of a tensor and a Python number has the type of the tensor."""
        if type(number) is int:
            return kind.name == "fp32" or number in wide.get(kind.name, ())
        return type(number) is float and kind.name == "fp32"

    def operands(
        self: Any, lhs: Any, rhs: Any, ptr_l: bool = False, ptr_r: bool = False, *rest: Any,
        **more: Any,
    ) -> Any:  # fmt: skip
        if isinstance(lhs, tl.tensor):
            kind = lhs.dtype
            if isinstance(rhs, tl.tensor):
                if kind.name == rhs.dtype.name and kind.name in ("int32", "int64", "fp32"):
                    return same_shape(self, lhs, rhs)
            elif stays(kind, rhs):
                return same_shape(self, lhs, self.scalar_constant(rhs, kind))
        elif isinstance(rhs, tl.tensor) and stays(rhs.dtype, lhs):
            return same_shape(self, self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, ptr_l, ptr_r, *rest, **more)

    tl.dtype.__eq__ = same_type
    semantic.broadcast_impl_value = same_shape
    semantic.binary_op_type_checking_impl = operands
