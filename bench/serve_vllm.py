# SPDX-License-Identifier: Apache-2.0
"""A child of ratios.py: one vLLM engine, in an environment of its own (--vllm-python)."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Read engine options, then batches; answer each with its time and counts."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm

    engine = vllm.LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": vllm.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = [
            vllm.SamplingParams(
                temperature=request["temperature"], max_tokens=length, ignore_eos=True
            )
            for length in request["lengths"]
        ]
        engine.reset_prefix_cache()
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        steps = sum(len(ids) - 1 for ids in tokens)
        reply = {"seconds": seconds, "tokens": tokens, "steps": steps, "accepted": 0}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
