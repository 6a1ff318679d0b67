# SPDX-License-Identifier: Apache-2.0
"""`sglang-dflash stats URL`: what a running server's budget chooses, and how well it guesses."""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections import defaultdict
from typing import NamedTuple

__all__ = ["Reading", "Stats", "address_of", "has_restarted", "read", "table"]

_LINE = re.compile(r"^sglang:dflash_(\w+?)_total\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(kind|position|bin)="(\w+)"')

Reading = dict[tuple[str, str], float]  # (counter, label) -> value


class Stats(NamedTuple):
    """What lies between two readings, or since the server's start.

    Attributes:
        steps: decode steps.
        drafted: share of them with the draft.
        draft_rows: rows of a request's block that the draft ran over, in the steps that had it.
        rows: verified rows of a request and step.
        tokens: committed tokens of a request and step; the acceptance length.
        predicted: what the budget expected of `tokens`.
        acceptance: by position in the block, the share accepted of those judged.
        curve: (predicted chance, accepted share, proposals judged) by bin.
        calibration_error: mean distance of the curve from the diagonal.
    """

    steps: int
    drafted: float
    draft_rows: float
    rows: float
    tokens: float
    predicted: float
    acceptance: list[float]
    curve: list[tuple[float, float, int]]
    calibration_error: float

    @classmethod
    def between(cls, now: Reading, before: Reading | None = None) -> Stats:
        """Return the figures of two readings; without the earlier one, since the start."""
        before = before or {}
        values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (counter, label), value in now.items():
            values[counter][label] = value - before.get((counter, label), 0.0)
        total = {counter: sum(labels.values()) for counter, labels in values.items()}
        steps, requests = total.get("steps", 0.0), total.get("request_steps", 0.0)
        positions = sorted(values["judged"], key=int)
        curve = [
            (values["chances"][k] / count, values["chance_accepted"][k] / count, int(count))
            for k, count in sorted(values["chance_judged"].items(), key=lambda item: int(item[0]))
            if count
        ]
        judged = sum(count for *_, count in curve)
        return cls(
            steps=int(steps),
            drafted=_share(values["steps"]["draft"], steps),
            draft_rows=_share(values["drafted_rows"]["draft"], values["request_steps"]["draft"]),
            rows=_share(total.get("verified_rows", 0.0), requests),
            tokens=_share(total.get("committed_tokens", 0.0), requests),
            predicted=_share(total.get("predicted_tokens", 0.0), requests),
            acceptance=[_share(values["accepted"][p], values["judged"][p]) for p in positions],
            curve=curve,
            calibration_error=_share(sum(abs(a - b) * c for a, b, c in curve), judged),
        )


def has_restarted(now: Reading, before: Reading) -> bool:
    """Tell whether the server was started anew between two readings: its counters have fallen."""
    # By less than a half they may: sums over ranks are rounded in an order that changes.
    return any(now.get(key, 0.0) < value - 0.5 for key, value in before.items())


def address_of(url: str) -> str:
    """Return where a server's counters are; a URL without a scheme is http."""
    full = url if "://" in url else f"http://{url}"
    return f"{full.rstrip('/')}/metrics"


def read(url: str) -> Reading:
    """Return the counters of a server.

    Raises:
        ValueError: nothing answers there, or the server has none of the counters.
    """
    address = address_of(url)
    try:
        with urllib.request.urlopen(address, timeout=10) as reply:
            reading = _counters(reply.read().decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{address}: {error}. Is the server up, with --enable-metrics?") from error
    if not reading:
        raise ValueError(
            f"{address} has no sglang:dflash counters: the server decodes nothing yet, verifies "
            "whole blocks (SGLANG_DFLASH_BUDGET=fixed, or auto on a GPU), or runs without DFLASH"
        )
    return reading


def _counters(text: str) -> Reading:
    reading: Reading = defaultdict(float)
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and (label := _LABEL.search(found[2])):
            reading[found[1], label[2]] += float(found[3])
    return dict(reading)


def table(stats: Stats) -> str:
    """Return the figures for people."""
    lines = [
        f"steps {stats.steps}, with the draft {stats.drafted:.0%}",
        f"rows a request and step: drafted {stats.draft_rows:.2f}, verified {stats.rows:.2f}",
        f"tokens a request and step {stats.tokens:.3f}, predicted {stats.predicted:.3f}",
        "accepted by position " + " ".join(f"{share:.2f}" for share in stats.acceptance),
        f"calibration error {stats.calibration_error:.3f}",
        "  predicted   accepted   proposals",
    ]
    lines += [f"  {chance:9.2f}  {share:9.2f}  {count:10d}" for chance, share, count in stats.curve]
    return "\n".join(lines)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
