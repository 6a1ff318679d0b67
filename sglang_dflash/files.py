# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and places where none can be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["place_problem", "whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield where to write what takes the place of `path` afterwards; a failure leaves that."""
    unfinished = path.with_suffix(".unfinished")
    yield unfinished
    unfinished.replace(path)


def place_problem(path: Path) -> str | None:
    """Return why no folder can be written at `path`, or None."""
    whole = path.absolute()
    nearest = next(each for each in (whole, *whole.parents) if os.path.exists(each))
    if not nearest.is_dir():
        return f"{nearest} is a file, expected a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written; name another folder"
    return None
