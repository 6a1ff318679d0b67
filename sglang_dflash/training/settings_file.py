# SPDX-License-Identifier: Apache-2.0
"""Settings from YAML, every unknown key and wrong type named."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

from sglang_dflash import strict
from sglang_dflash.training.settings import Settings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["settings_from_dict", "settings_from_yaml"]


def settings_from_dict(stated: dict[str, Any]) -> Settings:
    """Return the settings of a parsed YAML file; what it leaves out has its default.

    Raises:
        SettingsError: an unknown section or key, a value of another type or out of range.
    """
    try:
        return strict.build(Settings, stated)
    except strict.Mistake as mistake:
        raise SettingsError(_said(mistake)) from mistake


def settings_from_yaml(
    path: Path, flags: Mapping[str, Mapping[str, Any]] | None = None
) -> Settings:
    """Return the settings of a YAML file under those of the command line.

    They are checked together: what the file alone would contradict may be right with a flag.

    Args:
        path: The file.
        flags: By section and key; they override the file.

    Raises:
        SettingsError: it cannot be read, or `settings_from_dict` refuses it with the flags.
    """
    import yaml

    try:
        stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path}: cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise SettingsError(f"--config {path}: expected the sections draft, data and train")
    try:
        return settings_from_dict(_under(flags or {}, stated))
    except SettingsError as error:
        beside = " with the flags" if flags else ""
        raise SettingsError(f"--config {path}{beside}: {error}") from error


def _under(flags: Mapping[str, Mapping[str, Any]], stated: dict[str, Any]) -> dict[str, Any]:
    """Return what a file states under the flags; a section that is none is left as it is."""
    merged = dict(stated)
    for section, given in flags.items():
        own = merged.get(section, {})
        if isinstance(own, dict):
            merged[section] = {**own, **given}
    return merged


def _said(mistake: strict.Mistake) -> str:
    where = mistake.where
    match mistake:
        case strict.UnknownKey(key=key, near=near, known=known):
            what = f"{where}.{key}: unknown" if where else f"{key}: unknown section"
            return f"{what}; did you mean {near}?" if near else f"{what}; known: {', '.join(known)}"
        case strict.WrongValue(found=found, hint=hint) if hint is dict:
            return f"{where}: expected keys with values, found {found!r}"
        case strict.WrongValue(found=found, hint=hint):
            choices = typing.get_args(hint)  # of a Literal
            expected = " or ".join(choices) if choices else hint.__name__
            return f"{where} is {found!r}, expected {expected}"
        case strict.Refused(reason=reason):
            return reason  # it names the setting itself
    raise AssertionError(mistake)
