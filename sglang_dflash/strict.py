# SPDX-License-Identifier: Apache-2.0
"""Plain data into dataclasses: every key known, every value of its field's type.

What is wrong is raised as a `Mistake` that knows the place; whoever reads a file says it in the
words of that file.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

__all__ = ["Mistake", "Refused", "UnknownKey", "WrongValue", "build", "plain"]

T = TypeVar("T")


class Mistake(Exception):
    """Something in plain data that no dataclass takes.

    Attributes:
        where: Its place, dotted.
    """

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}" if where else text)
        self.where = where


class UnknownKey(Mistake):
    """A key that is no field.

    Attributes:
        key: It.
        known: The fields.
        near: The field that it is nearly, or None.
    """

    def __init__(self, where: str, key: str, known: list[str]) -> None:
        super().__init__(where, f"unknown key '{key}'")
        self.key, self.known = key, known
        self.near = next(iter(difflib.get_close_matches(key, known, n=1)), None)


class WrongValue(Mistake):
    """A value of another type than its field's.

    Attributes:
        found: It.
        hint: str, int, float, bool, a `Literal`, tuple where a list belongs, dict where keys do.
    """

    def __init__(self, where: str, found: object, hint: Any) -> None:
        super().__init__(where, f"{found!r} is not {hint}")
        self.found, self.hint = found, hint


class Refused(Mistake):
    """What a dataclass says itself: a field is missing, or its own checks failed.

    Attributes:
        reason: Its words.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.reason = reason


def build(cls: type[T], raw: object, where: str = "") -> T:
    """Return `cls` made of a mapping.

    Whole numbers pass for floats, numbers for text, and one value for a list of one.

    Args:
        cls: A dataclass; fields may be scalars, `X | None`, `Literal`, `tuple[X, ...]`,
            `dict[str, X]`, other dataclasses, or `Any`.
        raw: What a YAML or JSON parser gave.
        where: The place in the file; "" for its top.

    Raises:
        Mistake: an unknown key, a missing one, a wrong type, or a value that `cls` refuses.
    """
    if not isinstance(raw, Mapping):
        raise WrongValue(where, raw, dict)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            raise UnknownKey(where, str(key), list(fields))
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _convert(hints[name], raw[name], f"{where}.{name}".lstrip("."))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise Refused(where, f"'{name}' is missing")
    try:
        return cls(**values)
    except ValueError as error:  # a dataclass's own checks
        raise Refused(where, str(error)) from error


def plain(value: Any) -> Any:
    """Return dataclasses as the plain data that `build` reads."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _convert(hint: Any, raw: object, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return raw
    if origin in (types.UnionType, typing.Union):
        if raw is None and type(None) in inner:
            return None
        return _convert(next(kind for kind in inner if kind is not type(None)), raw, where)
    if dataclasses.is_dataclass(hint):
        return build(hint, raw, where)  # type: ignore[arg-type]
    if origin is tuple:
        return _tuple(inner[0], raw, where)
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise WrongValue(where, raw, dict)
        return {
            _key(inner[0], key, where): _convert(inner[1], item, f"{where}.{key}")
            for key, item in raw.items()
        }
    if origin is Literal:
        if raw not in inner:
            raise WrongValue(where, raw, hint)
        return raw
    return _scalar(hint, raw, where)


def _tuple(hint: Any, raw: object, where: str) -> tuple[Any, ...]:
    if raw is None or isinstance(raw, Mapping):
        raise WrongValue(where, raw, tuple)
    if not isinstance(raw, list | tuple):
        return (_convert(hint, raw, where),)
    return tuple(_convert(hint, item, f"{where}[{i}]") for i, item in enumerate(raw))


def _key(hint: type, raw: object, where: str) -> Any:
    if hint is int and isinstance(raw, str) and raw.isdigit():  # JSON has no other keys than text
        return int(raw)
    return _scalar(hint, raw, where)


def _scalar(hint: type, raw: object, where: str) -> Any:
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if hint is str and isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)  # a flag's value: `--port, 30000`
    # bool is an int for Python, not for a reader
    if not isinstance(raw, hint) or (isinstance(raw, bool) and hint is not bool):
        raise WrongValue(where, raw, hint)
    return raw
