# SPDX-License-Identifier: Apache-2.0
"""What is stored of a request and of a point; everything else is derived from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench.plan import Level, Point
from bench.strict import build

__all__ = ["PointRecord", "RequestRecord"]


@dataclass(frozen=True)
class RequestRecord:
    """One request.

    Attributes:
        index: Number of its prompt among the point's.
        start_s: When it was sent, from the point's first request.
        ttft_s: From sending to the first text.
        e2e_s: From sending to the end.
        prompt_tokens: As the server counts.
        output_tokens: As the server counts; 0 where it failed.
        chunk_s: When each chunk with text came, from sending.
        chunk_tokens: Tokens of the answer so far at each chunk; 0 where the server does not say.
        text_sha256: Of the answer, 16 hex digits: equal texts have equal ones.
        steps: Verify steps, 0 without speculation.
        accepted: Proposals accepted over all steps.
        histogram: [k] counts steps that accepted k proposals.
        verified_rows: Rows verified over all steps, where the server says.
        error: None, or why it failed.
    """

    index: int
    start_s: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    chunk_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    text_sha256: str
    steps: int
    accepted: int
    histogram: tuple[int, ...]
    verified_rows: int | None
    error: str | None


@dataclass(frozen=True)
class PointRecord:
    """One finished measurement.

    Attributes:
        point: Which.
        memory_bytes: What the server held afterwards, of `memory_kind` "gpu" or "rss".
        has_text: False where prompts were random tokens: tau then means nothing.
        finished: UTC time, ISO 8601.
        requests: In the prompts' order.
        cache_flushed: False where the server refused to empty its prefix cache before the point.
    """

    point: Point
    memory_bytes: int
    memory_kind: str
    has_text: bool
    finished: str
    requests: tuple[RequestRecord, ...]
    cache_flushed: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `from_json` reads it."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        point = self.point
        data["point"] = {
            "engine": point.engine, "dataset": point.dataset, **point.level._asdict(),
            "repeat": point.repeat,
        }  # fmt: skip
        data["requests"] = [asdict(request) for request in self.requests]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PointRecord:
        """Return the record that `to_json` wrote."""
        where = data["point"]
        level = Level(where["concurrency"], where["request_rate"])
        point = Point(where["engine"], where["dataset"], level, where["repeat"])
        requests = tuple(build(RequestRecord, raw, "request") for raw in data["requests"])
        return cls(**{**data, "point": point, "requests": requests})
