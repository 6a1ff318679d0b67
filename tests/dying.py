# SPDX-License-Identifier: Apache-2.0
"""The last words of an engine whose death ends the process of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from _pytest.capture import CaptureManager

__all__ = ["last_words"]

capture: CaptureManager | None = None  # pytest's own, which conftest.py puts here


@contextmanager
def last_words() -> Iterator[None]:
    """Print what pytest has captured when SGLang kills this process, for its engine died."""
    from sglang.srt.entrypoints import engine as launching
    from sglang.srt.managers import tokenizer_manager as running

    kill = launching.kill_process_tree

    def print_and_kill(parent_pid: int, include_parent: bool = True, **options: Any) -> None:
        try:
            if parent_pid == os.getpid() and include_parent and capture is not None:
                capture.suspend_global_capture(in_=True)
                sys.stderr.write("".join(capture.read_global_capture()))
                sys.stderr.flush()
        finally:
            kill(parent_pid, include_parent, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "kill_process_tree", print_and_kill)
        patch.setattr(running, "kill_process_tree", print_and_kill)
        yield
