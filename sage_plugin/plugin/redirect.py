"""Functions over their own module's globals in which attention alone comes to us.

A copy of a function has the original's code with a few names exchanged: where the original reads
the global `F`, the copy reads `_sage_plugin_F`, a stand-in that lies beside `F` in the same module.
All else that the copy reads and writes is the module's own, at the time of the call. A stand-in
asks the module what it has under the original's name at each call, so that a name which is bound to
something else is followed. No upstream source is repeated, and Dynamo traces all of it.
"""

from __future__ import annotations

import dis
import importlib.util
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch

from sage_plugin.plugin import route
from sage_plugin.plugin.hosts.transformers_dispatch import TABLE, Interfaces
from sage_plugin.plugin.prologue import rotary
from sage_plugin.plugin.prologue.rotary import ROTARY

DISPATCH = "dispatch_attention_fn"
SDPA = "scaled_dot_product_attention"
TARGETS = frozenset({DISPATCH, SDPA, TABLE})
"""Names by which attention is reached: diffusers', torch's, and transformers'."""
NO_CALL = "the processor or forward in place makes no attention call that can be redirected"
"""Why a layer is not patched whose code reaches none of them."""
DEFAULTS = 0b11
"""Bits of an instruction that makes a function with default arguments."""
PREFIX = "_sage_plugin_"
"""What the name of a stand-in begins with."""

Read = Callable[[], Any]


class NoRoomError(Exception):
    """A function has so many names that one of them cannot be exchanged."""


_copies: weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType]
_copies = weakref.WeakKeyDictionary()


def reaches_attention(function: types.FunctionType) -> bool:
    """Whether a function names attention, or calls a function of its module that does."""
    return _reaches(function, set())


def redirected(function: types.FunctionType) -> types.FunctionType:
    """The copy of a function whose attention comes to us; made once per function.

    Defaults, closure and attributes are the original's; a function in the closure that reaches
    attention, as a decorator's wrapper has it, is a copy too.

    Raises:
        NoRoomError: its code has no room for another name.
    """
    known = _copies.get(function)
    if known is not None:
        return known
    closure = None if function.__closure__ is None else tuple(map(_cell, function.__closure__))
    scope = function.__globals__
    code = _exchanged(function.__code__, scope)
    copied = _copies[function] = types.FunctionType(
        code, scope, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    copied.__qualname__ = function.__qualname__
    copied.__doc__ = function.__doc__
    copied.__dict__ = function.__dict__
    return copied


def _cell(cell: types.CellType) -> types.CellType:
    inner = _content(cell)
    if _is_function(inner) and reaches_attention(inner):
        return types.CellType(redirected(inner))
    return cell


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


# -- what reaches attention --------------------------------------------------------------------


def _reaches(function: types.FunctionType, seen: set[types.CodeType]) -> bool:
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    names = _names(function.__code__)
    if names & TARGETS:
        return True
    scope = function.__globals__
    helpers = [value for name in names if _is_helper(value := scope.get(name), scope)]
    enclosed = [value for c in function.__closure__ or () if _is_function(value := _content(c))]
    return any(_reaches(called, seen) for called in (*helpers, *enclosed))


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_function(value: object) -> TypeGuard[types.FunctionType]:
    return isinstance(value, types.FunctionType)


def _is_helper(value: object, scope: dict[str, Any]) -> TypeGuard[types.FunctionType]:
    """Whether a value is a plain function of the module whose globals are given."""
    return _is_function(value) and value.__globals__ is scope


# -- names exchanged in code -------------------------------------------------------------------


def _exchanged(code: types.CodeType, scope: dict[str, Any]) -> types.CodeType:
    """The code with other names where it reads attention from the globals, inner functions too."""
    sites = list(dis.get_instructions(code))
    chosen: dict[tuple[str, str], list[dis.Instruction]] = {}
    for site, after in zip(sites, [*sites[1:], None], strict=True):
        if site.opname == "LOAD_GLOBAL" and _is_way(site.argval, after, code, scope):
            chosen.setdefault((site.argval, ""), []).append(site)
    for module, site in _imported(sites, scope):
        chosen.setdefault((site.argval, module), []).append(site)
    names, bytecode = list(code.co_names), bytearray(code.co_code)
    for (name, module), reads in chosen.items():
        private = _stand_in_for(name, vars(sys.modules[module]) if module else scope)
        uses = [site for site in sites if site.opcode in dis.hasname and site.argval == name]
        if len(uses) == len(reads):
            names[names.index(name)] = private
        else:  # the name is also an attribute's, or written to
            names.append(private)
            for read in reads:
                _write(bytecode, read, len(names) - 1)
    own = _own_embeddings(sites)
    constants = tuple(
        (_on_stand_in if value in own else _exchanged)(value, scope)
        if isinstance(value, types.CodeType)
        else value
        for value in code.co_consts
    )
    return code.replace(co_names=tuple(names), co_code=bytes(bytecode), co_consts=constants)


def _write(bytecode: bytearray, read: dis.Instruction, index: int) -> None:
    """Let a read of a global read the name at another index.

    Raises:
        NoRoomError: the instruction is too short for the number.
    """
    assert read.arg is not None, "a read of a global has an argument"
    number = index
    if read.opname == "LOAD_GLOBAL":
        number = index << 1 | read.arg & 1  # the last bit tells of a call that follows
    wide = read.arg > 0xFF  # then an instruction before it has the upper bits
    if number > (0xFFFF if wide else 0xFF):
        raise NoRoomError(read.argval)
    bytecode[read.offset + 1] = number & 0xFF
    if wide:
        bytecode[read.offset - 1] = number >> 8


def _imported(
    sites: Sequence[dis.Instruction], scope: dict[str, Any]
) -> Iterator[tuple[str, dis.Instruction]]:
    """Where a function imports a rotary embedding for itself, and the module that it comes from."""
    for at, site in enumerate(sites):
        if site.opname != "IMPORT_FROM" or site.argval not in ROTARY:
            continue
        ways = [i for i in range(at) if sites[i].opname == "IMPORT_NAME"]
        level = sites[ways[-1] - 2].argval if ways else None
        if not isinstance(level, int):
            continue
        relative, package = sites[ways[-1]].argval, scope.get("__package__") or ""
        name = importlib.util.resolve_name("." * level + relative, package) if level else relative
        if hasattr(sys.modules.get(name), site.argval):  # else it is imported later, or never
            yield name, site


def _own_embeddings(sites: Sequence[dis.Instruction]) -> list[types.CodeType]:
    """Rotary embeddings that a function defines inside of itself, without defaults and closures."""
    found = []
    for site, after, later in zip(sites, sites[1:], sites[2:], strict=False):
        code = site.argval
        if not isinstance(code, types.CodeType) or code.co_name not in ROTARY or code.co_freevars:
            continue
        made_plainly = after.opname == "MAKE_FUNCTION" and not (after.arg or 0) & DEFAULTS
        if made_plainly and not (later.opname == "SET_FUNCTION_ATTRIBUTE" and later.arg in (1, 2)):
            found.append(code)
    return found


def _on_stand_in(code: types.CodeType, scope: dict[str, Any]) -> types.CodeType:
    """The code of a function that hands its arguments to what stands in for an inner one."""
    private = f"{PREFIX}{re.sub('[^a-zA-Z_]', '_', code.co_qualname)}_{code.co_firstlineno}"
    if private not in scope:
        original = types.FunctionType(code, scope)
        scope[private] = rotary.instead_of(lambda: original)
    return _handing.__code__.replace(
        co_names=(private,), co_name=code.co_name, co_qualname=code.co_qualname
    )


def _handing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    return ANYTHING(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _is_way(
    name: str, after: dis.Instruction | None, code: types.CodeType, scope: dict[str, Any]
) -> bool:
    """Whether attention is reached through what a global read gets.

    Args:
        name: the global.
        after: the instruction that follows, which loads an attribute or not.
        code: where it is read.
        scope: its module.
    """
    if name not in scope or (after is not None and after.opname == "STORE_GLOBAL"):
        return False
    value = scope[name]
    if name == TABLE or value is torch.nn.functional.scaled_dot_product_attention:
        return True
    if name == DISPATCH or name in ROTARY:
        return callable(value)
    if SDPA in code.co_names and isinstance(value, types.ModuleType):
        loads = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
        attribute = after.argval if after is not None and loads else None
        if value is torch.nn.functional:
            return attribute in (SDPA, None)
        return (value is torch.nn and attribute == "functional") or (
            value is torch and attribute == "nn"
        )
    return _is_helper(value, scope) and reaches_attention(value)


# -- stand-ins ---------------------------------------------------------------------------------


def _stand_in_for(name: str, scope: dict[str, Any]) -> str:
    """The name of what stands in for a global; it is put beside the global when first asked for."""
    private = PREFIX + name
    if private not in scope:
        scope[private] = None  # functions that call each other
        scope[private] = _stand_in(name, scope[name], _reader(name, scope))
    return private


def _reader(name: str, scope: dict[str, Any]) -> Read:
    """A function that reads a global of a module, as the module's own functions do."""
    code = _read.__code__.replace(co_names=(name,))
    return types.FunctionType(code, scope, _read.__name__)


def _read() -> Any:  # noqa: ANN401
    return ANYTHING  # type: ignore[name-defined]  # noqa: F821


def _stand_in(name: str, value: object, read: Read) -> object:
    if name == TABLE:
        return Interfaces(read)
    if name == DISPATCH:
        return route.dispatch_instead_of(read)
    if name in ROTARY:
        return rotary.instead_of(read)
    if isinstance(value, types.ModuleType):
        return _Forwarding(read)
    return _following(read, value, redirected(value) if _is_own(value) else route.sdpa)


def _is_own(value: object) -> TypeGuard[types.FunctionType]:
    return _is_function(value) and value is not torch.nn.functional.scaled_dot_product_attention


def _following(read: Read, known: object, ours: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for a function: ours while the module has the one that it had."""

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        now = read()
        return (ours if now is known else _ours_for(now))(*args, **kwargs)

    if _is_function(known):
        call.__dict__ = known.__dict__
    return call


def _ours_for(function: Callable[..., Any]) -> Callable[..., Any]:
    """The copy of what came in a function's place; in a graph, where none is made, itself."""
    if torch.compiler.is_compiling() or not _is_function(function):
        return function
    return redirected(function) if reaches_attention(function) else function


class _Forwarding:
    """Stands in for a module: everything is its own, but for the way to torch's attention."""

    _read: Read

    def __init__(self, read: Read) -> None:
        vars(self)["_read"] = read

    def __getattr__(self, name: str) -> object:
        module = self._read()
        value = getattr(module, name)
        if name == SDPA and module is torch.nn.functional:
            return route.sdpa
        if name == "functional" and module is torch.nn:
            return _FUNCTIONAL
        if name == "nn" and module is torch:
            return _NN
        return value

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._read(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._read(), name)


_FUNCTIONAL = _Forwarding(lambda: torch.nn.functional)
_NN = _Forwarding(lambda: torch.nn)
