# SPDX-License-Identifier: Apache-2.0
"""What users can get wrong, as exceptions whose text says how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "DRAFT_OPTION",
    "TARGET_OPTION",
    "PluginConflict",
    "SeamMoved",
    "UnsupportedCheckpoint",
    "draft_given_as",
]

# By which a server is given the two.
DRAFT_OPTION = "--speculative-draft-model-path"
TARGET_OPTION = "--model-path"


class UnsupportedCheckpoint(ValueError):
    """A draft checkpoint that cannot be served, or that its target contradicts.

    Attributes:
        option: By which the user gave the checkpoint that the text begins with, and which is put
            before it; None where there is none, or the text has it.
    """

    def __init__(self, text: str, *, option: str | None = None) -> None:
        super().__init__(text)
        self.option = option

    def __str__(self) -> str:
        """Return the option and the text."""
        text = super().__str__()
        return text if self.option is None else f"{self.option} {text}"


@contextmanager
def draft_given_as(option: str | None) -> Iterator[None]:
    """Have drafts that are refused in here named by this option, not by a server's.

    Args:
        option: None where the user gave none: the draft is only about to be made.
    """
    try:
        yield
    except UnsupportedCheckpoint as error:
        if error.option == DRAFT_OPTION:
            error.option = option
        raise


class SeamMoved(RuntimeError):
    """The installed SGLang differs from what the hooks rely on."""


class PluginConflict(RuntimeError):
    """Another plugin changes the same part of SGLang."""
