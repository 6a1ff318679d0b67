# SPDX-License-Identifier: Apache-2.0
"""Typed reading of a config.json that gathers every problem before it gives up."""

from __future__ import annotations

import math
from typing import Any, overload

from sglang_dflash.draft.schema import NESTED_KEYS

__all__ = ["Fields"]

_REQUIRED: Any = object()


class Fields:
    """Reads keys of a config.json; a wrong value becomes a problem and a harmless stand-in.

    Attributes:
        problems: What was wrong so far, in words.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self._config = config
        self._nested: dict[str, Any] = config.get("dflash_config") or {}
        for key in sorted(NESTED_KEYS & set(self._nested) & set(config)):
            if self._nested[key] != config[key]:
                self.problem(f"{key} is {config[key]!r} but {self._nested[key]!r} in dflash_config")

    def problem(self, text: str) -> None:
        """Note a problem once."""
        if text not in self.problems:
            self.problems.append(text)

    def has(self, key: str) -> bool:
        """Return whether a key is there and not null."""
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, from `dflash_config` first where it may stand; null is absent."""
        value = self._nested.get(key) if key in NESTED_KEYS else None
        if value is None:
            value = self._config.get(key)
        return default if value is None else value

    @overload
    def integer(
        self, key: str, default: int = ..., *, minimum: int = ..., maximum: int = ...
    ) -> int: ...
    @overload
    def integer(
        self, key: str, default: None, *, minimum: int = ..., maximum: int = ...
    ) -> int | None: ...
    def integer(
        self,
        key: str,
        default: int | None = _REQUIRED,
        *,
        minimum: int = 1,
        maximum: int = 2**31 - 1,
    ) -> int | None:
        """Return a key as a whole number within bounds, or `default` where absent."""
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is int and minimum <= value <= maximum:
            return value
        found = "missing" if value is None else repr(value)
        self.problem(f"{key} is {found}, expected a whole number from {minimum} to {maximum}")
        return max(minimum, 1)

    def number(self, key: str, default: float) -> float:
        """Return a key as a finite number above 0, or `default` where absent."""
        value = self.get(key, default)
        if type(value) in (int, float) and value > 0 and math.isfinite(value):
            return float(value)
        self.problem(f"{key} is {value!r}, expected a number above 0")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """Return a key as true or false, or `default` where absent."""
        value = self.get(key, default)
        if isinstance(value, bool):
            return value
        self.problem(f"{key} is {value!r}, expected true or false")
        return default
