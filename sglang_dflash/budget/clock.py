# SPDX-License-Identifier: Apache-2.0
"""When things happened on a device that the host does not wait for."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "DeviceClock", "HostClock", "clock_of"]


class Clock(Protocol):
    """Marks moments of a device's work, in the order of its stream."""

    def mark(self) -> Any:
        """Return the moment at which all work given so far is done."""

    def passed(self, mark: Any) -> bool:
        """Return whether a moment is over, without waiting for it."""

    def wait(self, mark: Any) -> None:
        """Wait until a moment is over."""

    def seconds(self, first: Any, last: Any) -> float:
        """Return the time between two moments that are over."""


class HostClock:
    """For work that the host does itself: a moment is over when it is marked."""

    def mark(self) -> float:
        """Return now."""
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        """Return True."""
        return True

    def wait(self, mark: float) -> None:
        """Do nothing."""

    def seconds(self, first: float, last: float) -> float:
        """Return the difference."""
        return last - first


class DeviceClock:
    """Events in the device's current stream.

    Args:
        device: a CUDA device, or one of another kind that has such events.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._module = torch.get_device_module(device)

    def mark(self) -> torch.Event:
        """Return an event at the end of the current stream."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.Event) -> bool:
        """Return whether the stream got there."""
        return bool(mark.query())

    def wait(self, mark: torch.Event) -> None:
        """Wait for the stream."""
        mark.synchronize()

    def seconds(self, first: torch.Event, last: torch.Event) -> float:
        """Return the time between two events that have passed."""
        return first.elapsed_time(last) / 1e3


def clock_of(device: torch.device | str) -> Clock:
    """Return the clock of a device."""
    return HostClock() if torch.device(device).type == "cpu" else DeviceClock(device)
