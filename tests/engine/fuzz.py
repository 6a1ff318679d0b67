# SPDX-License-Identifier: Apache-2.0
"""Random requests to random engines, each answer held against plain decoding's.

    python tests/engine/fuzz.py --minutes 30 --seed 1

Each cycle draws engine options and requests from the seed, asks a plain engine, then a DFLASH
engine that verifies other widths each step, some requests aborted midway, and compares tokens,
finish reasons and log-probabilities in float32. Each scheduler checks its books when it is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")

from engines import POOL_TOKENS, dflash_options, engine, prompts_for, with_test_plugin
from fastapi import HTTPException
from options import NoRepeat, Prompt
from pairs import Pair, make_pair
from tqdm import tqdm
from workloads import as_answer, flush

__all__ = ["main"]

EXACT = {"enable_deterministic_inference": True, "enable_custom_logit_processor": True}
REQUESTS = 240  # a cycle
TOLERANCE = 5e-4  # of a log-probability
GRAMMARS = [
    {"regex": "[a-z]{3,20}"},
    {"regex": "(ab|c[d-f]+)*[0-9]"},
    {"json_schema": '{"type": "array", "items": {"type": "integer"}, "maxItems": 5}'},
    {"ebnf": 'root ::= [a-m] root | "." '},
]
Request = dict[str, Any]


def draw_request(rng: random.Random, prompt: Prompt) -> Request:
    """Return the arguments of `Engine.async_generate` for one request."""

    def maybe(chance: float, value: Any) -> Any:
        return value if rng.random() < chance else None

    params: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.2, 0.7, 1.0, 1.7)),
        "sampling_seed": rng.randrange(1 << 31),
        "max_new_tokens": rng.choice((1, 2, 7, 20, 40, 60)),
        "ignore_eos": rng.random() < 0.5,
        "top_k": maybe(0.4, rng.choice((1, 2, 5, 40))),
        "top_p": maybe(0.4, rng.choice((0.3, 0.8, 0.95))),
        "frequency_penalty": maybe(0.2, rng.uniform(-1, 1.5)),
        "presence_penalty": maybe(0.2, rng.uniform(-1, 1.5)),
        "repetition_penalty": maybe(0.2, rng.uniform(0.7, 1.8)),
        "stop_token_ids": maybe(0.3, [rng.randrange(40, 120) for _ in range(4)]),
        "stop": maybe(0.2, [chr(rng.randrange(97, 123)) + chr(rng.randrange(97, 123))]),
        "logit_bias": maybe(0.2, {str(rng.randrange(32, 126)): rng.uniform(-9, 6)}),
    }
    if rng.random() < 0.3:
        params["min_new_tokens"] = rng.randint(0, params["max_new_tokens"])
    if rng.random() < 0.2:
        # Past the end of a grammar plain decoding adds a token, and SGLang's speculative path none;
        # and a minimum length may forbid the only token that a grammar leaves.
        params |= rng.choice(GRAMMARS) | {"ignore_eos": False, "min_new_tokens": 0}
    request: Request = {"input_ids": prompt(rng.choice((1, 3, 9, 30, 70, 120)), rng.randrange(60))}
    if rng.random() < 0.15:
        params["custom_params"] = {"width": rng.randint(1, 6)}
        request["custom_logit_processor"] = NoRepeat.to_str()
    # With top_k 1, SGLang scales log-probabilities by the temperature or not after the batch mates.
    if params["top_k"] != 1 and rng.random() < 0.2:
        request |= {"return_logprob": True, "top_logprobs_num": rng.randint(0, 4)}
    kept = {name: value for name, value in params.items() if value is not None}
    return {**request, "sampling_params": kept}


def draw_engine(rng: random.Random) -> tuple[int, dict[str, Any]]:
    """Return a block size and engine options."""
    options: dict[str, Any] = {
        "page_size": rng.choice((1, 1, 16)),
        "disable_overlap_schedule": rng.random() < 0.3,
        "disable_radix_cache": rng.random() < 0.2,
        "max_total_tokens": rng.choice((POOL_TOKENS, 1200)),
        "schedule_conservativeness": rng.choice((1.0, 0.05)),
    }
    if rng.random() < 0.5:
        options |= {"chunked_prefill_size": 32, "enable_mixed_chunk": rng.random() < 0.5}
    return rng.choice((2, 3, 5, 8, 16)), options


async def ask(
    started: Any, requests: list[Request], rng: random.Random | None
) -> list[dict[str, Any] | None]:
    """Return the answers; with `rng`, waves of random size, and some aborted (None)."""
    answers: list[dict[str, Any] | None] = []
    while len(answers) < len(requests):
        size = 24 if rng is None else rng.choice((1, 2, 5, 16, 40))
        wave = requests[len(answers) : len(answers) + size]
        tasks = []
        # Of equal length: SGLang aborts every request whose id begins with the one it is given.
        for number, request in enumerate(wave, start=len(answers)):
            aborts = rng is not None and rng.random() < 0.05
            tasks.append(_one(started, {**request, "rid": f"{id(requests)}-{number:05d}"}, aborts))
        answers += await asyncio.gather(*tasks)
    return answers


async def _one(started: Any, request: Request, aborts: bool) -> dict[str, Any] | None:
    if not aborts:
        try:
            return await started.async_generate(**request)
        except (ValueError, HTTPException) as error:
            return {"error": str(error)}
    task = asyncio.ensure_future(started.async_generate(**request))
    await asyncio.sleep(0.02)
    started.tokenizer_manager.abort_request(rid=request["rid"])
    with contextlib.suppress(ValueError, HTTPException):
        await task
    return None


def difference(request: Request, plain: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Return how two answers differ.

    Options may contradict each other until no token is left; SGLang then ends the request with an
    error. DFLASH may not end one that plain decoding answers.
    """
    if "error" in plain:
        return None
    if "error" in ours:
        return f"{request}\n  plain  {plain['output_ids']}\n  dflash {ours['error']}"
    expected, found = as_answer(plain), as_answer(ours)
    if expected != found:
        return f"{request}\n  plain  {expected}\n  dflash {found}"
    for name in ("output_token_logprobs", "output_top_logprobs"):
        one, other = (flat(answer.meta.get(name) or ()) for answer in (expected, found))
        if len(one) != len(other) or any(
            abs(a - b) > TOLERANCE for a, b in zip(one, other, strict=True)
        ):
            return f"{request}\n  {name}\n  plain  {one}\n  dflash {other}"
    return None


def flat(values: Any) -> list[float]:
    """Return the log-probabilities among nested (log-probability, token, text)."""
    if isinstance(values, tuple) and len(values) == 3:
        return [values[0]]
    return [value for each in values or () for value in flat(each)]


def cycle(pairs: list[Pair], seed: int) -> tuple[int, list[str]]:
    """Run one cycle; return how many answers were compared, and the differences."""
    rng = random.Random(seed)
    pair = rng.choice(pairs)
    prompt = prompts_for(pair)
    requests = [draw_request(rng, prompt) for _ in range(REQUESTS)]
    block_size, options = draw_engine(rng)
    with engine(pair, disable_overlap_schedule=True, **EXACT) as started:
        plain = started.loop.run_until_complete(ask(started, requests, None))
    environment = with_test_plugin(DFLASH_RANDOM_WIDTHS="1")
    options = {**EXACT, **dflash_options(pair, block_size), **options}
    with engine(pair, environment=environment, **options) as started:
        ours = started.loop.run_until_complete(ask(started, requests, rng))
        flush(started)
    compared = [each for each in zip(requests, plain, ours, strict=True) if each[2] is not None]
    found = [difference(*each) for each in compared]
    return len(compared), [f"{options}\n{text}" for text in found if text is not None]


def main() -> int:
    """Run cycles until the time is up; return 1 where an answer differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [make_pair(Path(folder) / family, family) for family in ("llama", "qwen3")]
        began, compared, wrong = time.monotonic(), 0, 0
        bar = tqdm(total=arguments.minutes, unit="min", bar_format="{l_bar}{bar}| {postfix}")
        for seed in range(arguments.seed, arguments.seed + 10_000):
            number, differences = cycle(pairs, seed)
            compared, wrong = compared + number, wrong + len(differences)
            for text in differences[:3]:
                bar.write(f"seed {seed}: {text}")
            minutes = (time.monotonic() - began) / 60
            bar.update(min(minutes, arguments.minutes) - bar.n)
            bar.set_postfix_str(f"seed {seed}: {compared} answers compared, {wrong} differ")
            if minutes >= arguments.minutes:
                break
        bar.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
