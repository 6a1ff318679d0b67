# SPDX-License-Identifier: Apache-2.0
"""Where results go when the command line names no place."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

__all__ = ["dated"]

RESULTS = Path(__file__).parent / "results"


def dated(name: str, *, quick: bool) -> Path:
    """Return `bench/results/DATE-name`, of today in UTC; a short form is marked `-quick`."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return RESULTS / f"{day}-{name}{'-quick' if quick else ''}"
