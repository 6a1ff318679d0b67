# SPDX-License-Identifier: Apache-2.0
"""Plain data into dataclasses: every key known, every type right, or an error that says where."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from bench.errors import BenchError

__all__ = ["build", "plain"]

T = TypeVar("T")
NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def build(cls: type[T], raw: object, where: str) -> T:
    """Return `cls` made of a mapping.

    Args:
        cls: A dataclass; fields may be scalars, `X | None`, `tuple[X, ...]`, `dict[str, X]`, other
            dataclasses, or `Any`.
        raw: What the YAML parser gave.
        where: The place in the file, for messages.

    Raises:
        BenchError: an unknown key (the nearest right one is named), a missing one, a wrong type.
    """
    if not isinstance(raw, Mapping):
        raise BenchError(f"{where}: expected keys and values, found {_shown(raw)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            raise BenchError(f"{where}: unknown key '{key}'{_nearest(str(key), list(fields))}")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _convert(hints[name], raw[name], f"{where}.{name}".lstrip("."))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise BenchError(f"{where}: '{name}' is missing")
    try:
        return cls(**values)
    except ValueError as error:  # a dataclass's own checks
        raise BenchError(f"{where}: {error}") from error


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
        if not isinstance(raw, list | tuple):
            raise BenchError(f"{where}: expected a list, found {_shown(raw)}")
        return tuple(_convert(inner[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise BenchError(f"{where}: expected keys and values, found {_shown(raw)}")
        return {
            _key(inner[0], key, where): _convert(inner[1], item, f"{where}.{key}")
            for key, item in raw.items()
        }
    return _scalar(hint, raw, where)


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
        raise BenchError(f"{where}: expected {NAMES[hint]}, found {_shown(raw)}")
    return raw


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f" (known: {', '.join(known)})"


def _shown(raw: object) -> str:
    return "nothing" if raw is None else repr(raw)[:60]
