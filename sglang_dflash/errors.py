# SPDX-License-Identifier: Apache-2.0
"""What users can get wrong, as exceptions whose text says how to mend it."""

from __future__ import annotations

__all__ = ["PluginConflict", "SeamMoved", "UnsupportedCheckpoint"]


class UnsupportedCheckpoint(ValueError):
    """A draft checkpoint that cannot be served, or that its target contradicts."""


class SeamMoved(RuntimeError):
    """The installed SGLang differs from what the hooks rely on."""


class PluginConflict(RuntimeError):
    """Another plugin changes the same part of SGLang."""
