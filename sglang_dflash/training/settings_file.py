# SPDX-License-Identifier: Apache-2.0
"""Settings from YAML, every unknown key and wrong type named."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

from sglang_dflash.training.settings import Settings, SettingsError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["settings_from_dict", "settings_from_yaml"]


def settings_from_dict(stated: dict[str, Any]) -> Settings:
    """Return the settings of a parsed YAML file; what it leaves out has its default.

    Raises:
        SettingsError: an unknown section or key, a value of another type or out of range.
    """
    sections = {f.name: f.default_factory for f in dataclasses.fields(Settings)}
    values = {}
    for name, keys in stated.items():
        if name not in sections:
            raise SettingsError(f"{name}: unknown section{_hint(name, sections)}")
        values[name] = _section(name, typing.get_type_hints(Settings)[name], keys)
    return Settings(**values)


def settings_from_yaml(path: Path) -> Settings:
    """Return the settings of a YAML file.

    Raises:
        SettingsError: it cannot be read, or `settings_from_dict` refuses it.
    """
    import yaml

    try:
        stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path}: cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise SettingsError(f"--config {path}: expected the sections draft, data and train")
    try:
        return settings_from_dict(stated)
    except SettingsError as error:
        raise SettingsError(f"--config {path}: {error}") from error


def _section(name: str, section: type, keys: Any) -> Any:
    if not isinstance(keys, dict):
        raise SettingsError(f"{name}: expected keys with values, found {keys!r}")
    hints = typing.get_type_hints(section)
    for key in keys:
        if key not in hints:
            raise SettingsError(f"{name}.{key}: unknown{_hint(key, hints)}")
    return section(**{key: _typed(f"{name}.{key}", keys[key], hints[key]) for key in keys})


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return a YAML value as a field's type; whole numbers pass for floats, lists for tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _typed(name, value, arguments[0])
    if origin is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_typed(name, each, arguments[0]) for each in values)
    if origin is Literal:
        if value in arguments:
            return value
        raise SettingsError(f"{name} is {value!r}, expected {' or '.join(arguments)}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise SettingsError(f"{name} is {value!r}, expected {hint.__name__}")
    return value


def _hint(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
