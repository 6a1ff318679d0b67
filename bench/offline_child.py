# SPDX-License-Identifier: Apache-2.0
"""The child of `offline`: a job on standard input, one JSON line per measured batch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["main", "measured"]


def main() -> None:
    """Start the engine and do the job."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints; the replies must stay alone
    job = json.load(sys.stdin)
    import sglang

    engine = sglang.Engine(**job["options"])
    for reply in measured(engine, job):
        print(json.dumps(reply), file=replies)
    replies.flush()
    engine.shutdown()


def measured(engine: Any, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Warm up, then yield what each batch gave in each repeat.

    Args:
        engine: An `sgl.Engine`.
        job: As `bench.offline.job_of` makes it.
    """
    short = {**job["sampling"], "max_new_tokens": job["warmup_tokens"]}
    for batch in job["batches"].values():
        engine.generate(input_ids=batch, sampling_params=short)
    for repeat, lengths in enumerate(job["lengths"]):
        for dataset, batch in job["batches"].items():
            engine.flush_cache()
            sampling = [{**job["sampling"], "max_new_tokens": n} for n in lengths[dataset]]
            found = _batch(engine, batch, sampling)
            yield {"dataset": dataset, "repeat": repeat, **found}


def _batch(engine: Any, batch: list[list[int]], sampling: list[dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    outputs = engine.generate(input_ids=batch, sampling_params=sampling)
    seconds = time.perf_counter() - start
    metas = [output["meta_info"] for output in outputs]
    return {
        "requests": len(batch),
        "seconds": seconds,
        "tokens": sum(meta["completion_tokens"] for meta in metas),
        "steps": sum(meta.get("spec_verify_ct", 0) for meta in metas),
        "accepted": sum(meta.get("spec_num_correct_drafts", 0) for meta in metas),
    }


if __name__ == "__main__":
    main()
