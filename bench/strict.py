# SPDX-License-Identifier: Apache-2.0
"""Recipes and records into dataclasses; what is wrong is said in a recipe's words."""

from __future__ import annotations

import typing
from typing import TypeVar

from bench.errors import BenchError
from sglang_dflash import strict

__all__ = ["build"]

T = TypeVar("T")
NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false",
         tuple: "a list", dict: "keys and values"}  # fmt: skip


def build(cls: type[T], raw: object, where: str) -> T:
    """Return `cls` made of a mapping; see `sglang_dflash.strict.build`.

    Raises:
        BenchError: an unknown key (the nearest right one is named), a missing one, a wrong type.
    """
    try:
        return strict.build(cls, raw, where)
    except strict.Mistake as mistake:
        raise BenchError(f"{mistake.where}: {_said(mistake)}") from mistake


def _said(mistake: strict.Mistake) -> str:
    match mistake:
        case strict.UnknownKey(key=key, near=None, known=known):
            return f"unknown key '{key}' (known: {', '.join(known)})"
        case strict.UnknownKey(key=key, near=near):
            return f"unknown key '{key}'; did you mean '{near}'?"
        case strict.WrongValue(found=found, hint=hint):
            shown = "nothing" if found is None else repr(found)[:60]
            expected = NAMES.get(hint) or " or ".join(map(str, typing.get_args(hint)))
            return f"expected {expected}, found {shown}"
        case strict.Refused(reason=reason):
            return reason
    raise AssertionError(mistake)
