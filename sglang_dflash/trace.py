# SPDX-License-Identifier: Apache-2.0
"""Every decode step in a file: what the budget saw, chose and got."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_dflash import __version__
from sglang_dflash.budget.policy import MeasuredWidths, StepFacts, WidthPolicy
from sglang_dflash.verify.rows import Rows

__all__ = ["Trace", "TracedWidths", "read_trace"]

_DIGITS = 4  # of probabilities


class TracedWidths(WidthPolicy):
    """The measured policy, writing each step as a JSON line; for `SGLANG_DFLASH_TRACE=FILE`.

    The first line has `sglang_dflash` (the version) and `block_size`. A step has

    - `time`: when it began, Unix seconds; `iteration`: the scheduler's count of forwards;
    - `requests`, and `context_tokens`: their positions together, the block's included;
    - `draft_width`: rows of each block that the draft ran over, 1 for a plain step; `explores`: a
      look, or a plain step to time it;
    - `widths` and `accepted`: verified rows and accepted proposals of each request;
    - `tokens` committed, and `expected_tokens`, all requests together;
    - `confidence` and `chances` of each request's proposals, the draft's own probability
      (`Proposal.confidence`) and the calibrated one; `sampled`: how many requests are. All null for
      a plain step, and for whole blocks that were verified without looking at them;
    - `seconds` to the next step's start; null where a prefill or a pause came between.

    A step is written when the next begins; the last one of a server never is. With overlap
    scheduling a request takes part in one step more than it needs, as it does in any decoding.

    Args:
        inner: who decides.
        path: the file, made anew.
        block_size: B.
    """

    wants_confidence = True

    @property
    def judges(self) -> bool:
        """What the policy says; see `WidthPolicy`."""
        return self.inner.judges

    def __init__(self, inner: MeasuredWidths, path: str, block_size: int) -> None:
        self.inner = inner
        self._file = Path(path).open("w", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._write({"sglang_dflash": __version__, "block_size": block_size})
        self._record: dict[str, Any] | None = None
        self._facts: StepFacts | None = None
        self._started = 0.0

    def draft_width(self, facts: StepFacts) -> int:
        """Write the step before, and return what the policy says; see `WidthPolicy`."""
        now = time.perf_counter()
        if self._record is not None:
            follows = self._facts is not None and facts.follows(self._facts)
            seconds = round(now - self._started, 6) if follows else None
            self._write(self._record | {"seconds": seconds})
        self._record, self._facts, self._started = None, facts, now
        return self.inner.draft_width(facts)

    def draft_begins(self) -> None:
        """Tell the policy; see `WidthPolicy`."""
        self.inner.draft_begins()

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        """Return what the policy says; see `WidthPolicy`.

        Args:
            confidence: [n, w-1] float32; None for a step without the draft.
            sampled: [n] bool.
        """
        return self.inner.widths(confidence, sampled)

    def settle(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Note the step, and let the policy learn from it; see `WidthPolicy`.

        Args:
            rows: the M verified rows.
            num_accepted: [n] int.
        """
        facts, (width, explores, expected, judged) = self._facts, self.inner.latest
        assert facts is not None, "a step begins with `draft_width`"
        n, accepted = len(rows.widths_cpu), num_accepted.tolist()
        self._record = {
            "time": round(time.time() - (time.perf_counter() - self._started), 4),
            "iteration": facts.iteration,
            "requests": n,
            "context_tokens": facts.context_tokens,
            "draft_width": width,
            "explores": explores,
            "widths": list(rows.widths_cpu),
            "accepted": accepted,
            "tokens": n + sum(accepted),
            "expected_tokens": round(expected, _DIGITS) if width > 1 else n,
            "confidence": None if judged is None else _rounded(judged.confidence),
            "chances": None if judged is None else _rounded(judged.chances),
            "sampled": None if judged is None else int(judged.sampled.sum()),
        }
        self.inner.settle(rows, num_accepted)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


class Trace(NamedTuple):
    """A trace that was read.

    Attributes:
        block_size: B.
        steps: as `TracedWidths` describes them.
    """

    block_size: int
    steps: list[dict[str, Any]]


def read_trace(path: Path) -> Trace:
    """Return the steps of a trace, of a running server's too: a line half written is left out.

    Raises:
        ValueError: the file is no trace.
    """
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    header = json.loads(lines[0]) if lines else {}
    if "sglang_dflash" not in header:
        raise ValueError(
            f"{path} is no trace of sglang-dflash: set SGLANG_DFLASH_TRACE to make one"
        )
    return Trace(header["block_size"], [json.loads(line) for line in lines[1:]])


def _rounded(values: torch.Tensor) -> list[list[float]]:
    return values.double().round(decimals=_DIGITS).tolist()
