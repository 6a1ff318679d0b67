# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, whenever a run is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield where to write what takes the place of `path` afterwards; a failure leaves that."""
    unfinished = path.with_suffix(".unfinished")
    yield unfinished
    unfinished.replace(path)
