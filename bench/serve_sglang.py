# SPDX-License-Identifier: Apache-2.0
"""A child of ratios.py: one SGLang engine that answers JSON lines on its standard input."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


async def answer(engine: Any, request: dict[str, Any]) -> list[Any]:
    """Return all answers, so many at a time: when one ends, the next begins."""
    slots = asyncio.Semaphore(request["concurrency"])

    async def one(ids: list[int], length: int) -> Any:
        params = {
            "temperature": request["temperature"], "max_new_tokens": length, "ignore_eos": True
        }  # fmt: skip
        async with slots:
            return await engine.async_generate(input_ids=ids, sampling_params=params)

    return await asyncio.gather(*map(one, request["prompts"], request["lengths"]))


def main() -> None:
    """Read engine options, then batches; answer each with its time and counts."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints; the replies must stay alone
    import sglang

    engine = sglang.Engine(**json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": sglang.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        engine.flush_cache()
        start = time.perf_counter()
        outputs = engine.loop.run_until_complete(answer(engine, request))
        seconds = time.perf_counter() - start
        metas = [output["meta_info"] for output in outputs]
        reply = {
            "seconds": seconds,
            "tokens": [output["output_ids"] for output in outputs],
            "steps": sum(m.get("spec_verify_ct", m["completion_tokens"] - 1) for m in metas),
            "accepted": sum(m.get("spec_num_correct_drafts", 0) for m in metas),
        }
        print(json.dumps(reply), file=replies, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
