"""Strict JSON forms of frozen dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, Self, get_args, get_origin

from sage_plugin.errors import ConfigError


class JsonRecord:
    """Strict JSON in and out for a frozen dataclass."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON types, in field order."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Check and build a record from parsed JSON.

        Raises:
            ConfigError: naming the record and the field that is unknown, missing or wrongly typed.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"{cls.__name__}: got {_kind(data)}, expected a JSON object")
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(map(str, set(data) - set(fields)))
        if unknown:
            raise ConfigError(
                f"{cls.__name__}: unknown field {unknown[0]!r}; allowed: {', '.join(fields)}"
            )
        hints = _types_of(cls)  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for name, spec in fields.items():
            if name in data:
                values[name] = _checked(f"{cls.__name__}.{name}", data[name], hints[name])
            elif _required(spec):
                raise ConfigError(f"{cls.__name__}: field {name!r} is missing")
        return cls(**values)

    def replaced(self, **changes: Any) -> Self:  # noqa: ANN401
        """A copy with some fields changed; an unknown field is a `ConfigError`."""
        return type(self).from_json({**self.to_json(), **changes})

    def text(self) -> str:
        """Canonical JSON text, the form in which it crosses the torch op."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))


def record_from_json(data: object, kinds: Iterable[Any]) -> Any:  # noqa: ANN401
    """Check and build a record that may be of several kinds: the one with most of its fields.

    Raises:
        ConfigError: as `JsonRecord.from_json` of that kind.
    """
    return _fitting(data, list(kinds)).from_json(data)


@functools.cache
def _types_of(cls: type) -> dict[str, Any]:
    """The types of a record's fields, which take Python longer to find than a record to check."""
    return typing.get_type_hints(cls)


def _required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _checked(where: str, value: object, hint: Any) -> object:  # noqa: ANN401
    """Return `value` as the type that `hint` names, or raise a `ConfigError`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        return _checked(where, value, _fitting(value, inner))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: got {_kind(value)}, expected a list")
        if all(type(one) is args[0] for one in value):  # most of a large file
            return tuple(value)
        return tuple(_checked(f"{where}[{i}]", v, args[0]) for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise ConfigError(f"{where}: got {_kind(value)}, expected an object")
        return {k: _checked(f"{where}.{k}", v, args[1]) for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, JsonRecord):
        if isinstance(value, hint):
            return value
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: got {_kind(value)}, expected an object")
        return hint.from_json(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(where, value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where}: got {value!r} ({_kind(value)}), expected {hint.__name__}")
    return value


def _fitting(value: object, kinds: list[Any]) -> Any:  # noqa: ANN401
    """Return the kind of a value that may be of several: the record with most of its fields."""
    if isinstance(value, dict) and len(kinds) > 1:
        return max(kinds, key=lambda kind: len(value.keys() & _fields(kind)))
    if len(kinds) == 1:
        return kinds[0]
    return next((kind for kind in kinds if isinstance(value, kind)), kinds[0])


def _fields(kind: Any) -> set[str]:  # noqa: ANN401
    return {field.name for field in dataclasses.fields(kind)}


def _float(where: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where}: a whole number too large for a float") from None
