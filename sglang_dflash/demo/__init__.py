# SPDX-License-Identifier: Apache-2.0
"""The demo: a small target fetched once, the bundled draft, and a comparison of the two ways."""

from __future__ import annotations

__all__ = ["DemoError"]


class DemoError(RuntimeError):
    """What keeps the demo from running; the text says what to do about it."""
