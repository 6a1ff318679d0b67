# SPDX-License-Identifier: Apache-2.0
"""What a user can do something about."""

from __future__ import annotations

__all__ = ["BenchError", "ServerDied"]


class BenchError(Exception):
    """A mistake in a recipe, a path, a port or a run folder; the text names the way out."""


class ServerDied(BenchError):
    """A server did not start, or ended while it was measured; the text has its log's tail."""
