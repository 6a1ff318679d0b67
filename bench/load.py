# SPDX-License-Identifier: Apache-2.0
"""One point's load, by the request functions of SGLang's own benchmark.

Reused from `sglang.benchmark.serving`: the streaming requests and their clock (so that TTFT and E2E
are what `sglang.bench_serving` reports), Poisson arrivals, flushing the prefix cache. Added around
it: the last chunk's `meta_info`, and when each chunk came with how many tokens. The closed loop is
that module's too: a semaphore over all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.benchmark import serving
from sglang.benchmark.datasets.common import DatasetRow

from bench.config import Load
from bench.errors import BenchError
from bench.plan import Level
from bench.records import RequestRecord
from bench.server import Server

__all__ = ["Target", "flush_cache", "record_of", "run_load"]

WATCH_S = 0.5
ERROR_CHARS = 500
# What the request functions read of `sglang.bench_serving`'s own command line.
CLIENT_ARGUMENTS = {
    "temperature": 0.0, "top_p": 1.0, "disable_ignore_eos": False, "disable_stream": False,
    "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1,
    "top_logprobs_num": 0, "token_ids_logprob": None, "header": None, "cache_report": False,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A server, as requests see it.

    Attributes:
        server: Where.
        model: What it calls the model.
        count_tokens: Counts an answer's tokens, for a server that does not.
    """

    server: Server
    model: str
    count_tokens: Callable[[str], int]


Chunks = list[tuple[float, int | None]]
Arrivals = AsyncIterator[DatasetRow]


def run_load(
    target: Target,
    prompts: Sequence[list[int]],
    level: Level,
    load: Load,
    *,
    lengths: Sequence[int],
) -> list[RequestRecord]:
    """Ask all prompts at one load level; return a record each, in the prompts' order.

    A request that fails is recorded with its error.

    Args:
        target: Who is asked.
        prompts: Token ids of each.
        level: The load.
        load: How it is asked.
        lengths: The most tokens of each answer.

    Raises:
        ServerDied: the server's process ended meanwhile.
        BenchError: the point took longer than `load.point_timeout_s`.
    """
    serving.set_global_args(argparse.Namespace(**CLIENT_ARGUMENTS))
    with _tap() as chunks:
        rows = [DatasetRow(ids, len(ids), n) for ids, n in zip(prompts, lengths, strict=True)]
        return asyncio.run(_watched(target, rows, level, load, chunks))


def flush_cache(server: Server) -> bool:
    """Empty the server's prefix cache, so that no point profits from one before it.

    vLLM has that call in its development mode only (`VLLM_SERVER_DEV_MODE=1`).

    Returns:
        Whether it is empty; False for a server other than SGLang's that refuses.

    Raises:
        BenchError: an SGLang server refuses.
    """
    backend = "sglang" if server.sglang else "vllm"
    try:
        serving.flush_server_cache(server.url, backend)
    except serving.requests.RequestException as error:
        if server.sglang:
            server.require_alive()
            raise BenchError(f"{server.name}: cannot flush the cache: {error}") from error
        return False
    return True


@contextlib.contextmanager
def _tap() -> Iterator[dict[int, tuple[Chunks, dict[str, Any]]]]:
    """Collect time and tokens of each chunk, and the last `meta_info`, by the output's id.

    Every request function hands each chunk to this one function of SGLang's benchmark.
    """
    original = getattr(serving, "_record_server_prompt_len", None)
    if original is None:
        raise BenchError("this SGLang's benchmark has no _record_server_prompt_len: use 0.5.23")
    seen: dict[int, tuple[Chunks, dict[str, Any]]] = {}

    def record(data: dict[str, Any], output: serving.RequestFuncOutput) -> None:
        original(data, output)
        chunks, meta = seen.setdefault(id(output), ([], {}))
        info = data.get("meta_info") or {}
        tokens = info.get("completion_tokens", (data.get("usage") or {}).get("completion_tokens"))
        has_text = data.get("text") or any(c.get("text") for c in data.get("choices") or [])
        if has_text:
            chunks.append((time.perf_counter(), tokens))
        meta.update(info)
        if "error" in data:
            meta["error"] = _last_line(str(data["error"]))

    serving._record_server_prompt_len = record
    try:
        yield seen
    finally:
        serving._record_server_prompt_len = original


async def _watched(
    target: Target, rows: Sequence[DatasetRow], level: Level, load: Load,
    seen: dict[int, tuple[Chunks, dict[str, Any]]],
) -> list[RequestRecord]:  # fmt: skip
    """Run the load beside a watch on the process: a dead server would leave requests waiting."""
    work = asyncio.ensure_future(_ask_all(target, rows, level, load))
    deadline = time.monotonic() + load.point_timeout_s
    try:
        while not (await asyncio.wait({work}, timeout=WATCH_S))[0]:
            target.server.require_alive()
            if time.monotonic() > deadline:
                raise BenchError(
                    f"{target.server.name}: {level} took longer than {load.point_timeout_s:g} s"
                )
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    outputs = work.result()
    if not all(output.success for output in outputs):
        # A broken connection is seen before the process has ended; a dead server is no slow point.
        await asyncio.sleep(WATCH_S)
        target.server.require_alive()
    origin = min(output.start_time for output in outputs)
    return [
        record_of(i, output, seen.get(id(output), ([], {})), origin, target)
        for i, output in enumerate(outputs)
    ]


async def _ask_all(
    target: Target, rows: Sequence[DatasetRow], level: Level, load: Load
) -> list[serving.RequestFuncOutput]:
    ask, url = _request_function(target.server)
    slots = asyncio.Semaphore(level.concurrency or len(rows))

    async def one(row: DatasetRow) -> serving.RequestFuncOutput:
        async with slots:
            return await ask(
                serving.RequestFuncInput(
                    prompt=row.prompt, api_url=url, prompt_len=row.prompt_len,
                    output_len=row.output_len, model=target.model, lora_name="", image_data=None,
                    extra_request_body=_body(target.server, load, row.output_len),
                )
            )  # fmt: skip

    np.random.seed(load.seed)  # SGLang draws the arrivals from numpy's global generator
    arrivals = serving.get_request(rows, level.request_rate or float("inf"))
    tasks = [asyncio.create_task(one(row)) async for row in arrivals]
    return await asyncio.gather(*tasks)


def _request_function(
    server: Server,
) -> tuple[Callable[..., Awaitable[serving.RequestFuncOutput]], str]:
    if server.sglang:
        return serving.async_request_sglang_generate, f"{server.url}/generate"
    return serving.async_request_openai_completions, f"{server.url}/v1/completions"


def _body(server: Server, load: Load, max_new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": load.temperature, "ignore_eos": load.ignore_eos, **load.sampling}
    if server.sglang:
        return {"sampling_params": {**sampling, "max_new_tokens": max_new_tokens}}
    return sampling


def record_of(
    index: int, output: serving.RequestFuncOutput, seen: tuple[Chunks, dict[str, Any]],
    origin: float, target: Target,
) -> RequestRecord:  # fmt: skip
    """Return what is stored of one request.

    Args:
        index: Its prompt's number.
        output: What SGLang's request function returned.
        seen: When chunks came with how many tokens so far, and the last `meta_info`.
        origin: When the point's first request was sent, on the clock of `output`.
        target: Who was asked.
    """
    chunks, meta = seen
    steps = meta.get("spec_verify_ct", 0)
    error = None if output.success else _last_line(output.error)
    # SGLang's request function calls an aborted stream a success of full length
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        error = _last_line(finish.get("message") or "aborted")
    tokens = output.output_len
    if target.server.sglang:
        tokens = meta.get("completion_tokens", 0)
    elif not any(count for _, count in chunks):
        tokens = target.count_tokens(output.generated_text)
    if error is None and tokens == 0:
        error = meta.get("error", "no tokens came")
    return RequestRecord(
        index=index,
        start_s=round(output.start_time - origin, 5),
        ttft_s=round(output.ttft, 5),
        e2e_s=round(output.latency, 5),
        prompt_tokens=output.prompt_len,
        output_tokens=tokens if error is None else 0,
        # as fine as e2e_s: rounded up past the answer's end, a chunk would fall out of the window
        chunk_s=tuple(round(at - output.start_time, 5) for at, _ in chunks),
        chunk_tokens=tuple(count or 0 for _, count in chunks),
        text_sha256=hashlib.sha256(output.generated_text.encode()).hexdigest()[:16],
        steps=steps,
        accepted=meta.get("spec_num_correct_drafts", 0),
        histogram=tuple(meta.get("spec_correct_drafts_histogram", ())),
        verified_rows=_verified_rows(meta, steps),
        error=error,
    )


def _verified_rows(meta: dict[str, Any], steps: int) -> int | None:
    """Return the rows of all verify steps, anchors included; None where the server does not say.

    A worker that verifies what pays says each step's width; one that does not verifies all that it
    proposes, and SGLang says how many those are.
    """
    if widths := meta.get("spec_cap_lens_histogram"):
        return sum(width * count for width, count in enumerate(widths))
    proposed = meta.get("spec_num_proposed_drafts")
    return None if proposed is None else proposed + steps


def _last_line(text: str) -> str:
    """Return what says it: of a traceback, the last line."""
    lines = text.strip().splitlines()
    return lines[-1][:ERROR_CHARS] if lines else "no reason given"
