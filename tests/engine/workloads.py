# SPDX-License-Identifier: Apache-2.0
"""Batches of requests whose answers must not depend on whether, or how, DFLASH runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from options import greedy_requests, seeded_requests

__all__ = [
    "Answer",
    "Engine",
    "Workload",
    "ask",
    "dependent_workloads",
    "flush",
    "option_workloads",
    "plain_workloads",
]

Engine = Any  # sglang.Engine, imported only where an engine starts


@dataclass(frozen=True)
class Answer:
    """What must be equal, and what is measured beside it."""

    tokens: list[int]
    finish_reason: dict[str, Any]
    text: str
    meta: dict[str, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Workload:
    """Rounds of requests; the requests of a round run together.

    Attributes:
        name: for the test's name.
        rounds: each a list of (prompt token ids, sampling parameters); a custom processor stands
            among the parameters.
        flush: whether the radix cache is emptied before it.
    """

    name: str
    rounds: list[list[tuple[list[int], dict[str, Any]]]]
    flush: bool = True


def flush(engine: Engine) -> None:
    """Empty the radix cache; the scheduler may still be at the step after the last answer."""
    deadline = time.monotonic() + 10
    while not (reply := engine.flush_cache()).success:
        assert time.monotonic() < deadline, f"the cache cannot be flushed: {reply.message}"
        time.sleep(0.05)


def ask(engine: Engine, workload: Workload) -> list[Answer]:
    """Return the answers of all rounds, in order."""
    if workload.flush:
        flush(engine)
    answers = []
    for requests in workload.rounds:
        params = [{"temperature": 0, **params} for _, params in requests]
        processors = [each.pop("custom_logit_processor", None) for each in params]
        outputs = engine.generate(
            input_ids=[prompt for prompt, _ in requests],
            sampling_params=params,
            custom_logit_processor=processors if any(processors) else None,
        )
        answers += [as_answer(output) for output in outputs]
    return answers


def as_answer(output: dict[str, Any]) -> Answer:
    """Return what SGLang's output says."""
    meta = output["meta_info"]
    return Answer(output["output_ids"], meta["finish_reason"], output["text"], meta)


def plain_workloads(prompt: Callable[[int, int], list[int]], *, long: int) -> list[Workload]:
    """Return workloads that need nothing but prompts.

    Args:
        prompt: (length, seed) -> token ids.
        long: tokens in the longest prompts, beyond a prefill chunk.
    """
    free = {"ignore_eos": True}
    lengths = torch.randint(1, long, (16,), generator=torch.Generator().manual_seed(7)).tolist()
    batch = [
        (prompt(length, i), {"max_new_tokens": 1 + (5 * i) % 40, "ignore_eos": i % 3 > 0})
        for i, length in enumerate(lengths)
    ]
    budgets = [(prompt(9, 100), {"max_new_tokens": m, **free}) for m in range(1, 18)]
    shared = prompt(long // 2, 200)
    hits = [
        [(shared + prompt(tail, 201 + tail), {"max_new_tokens": 24, **free})] for tail in (1, 7, 16)
    ]
    return [
        Workload("one request", [[(prompt(12, 1), {"max_new_tokens": 64, **free})]]),
        Workload("one token prompt", [[(prompt(1, 2), {"max_new_tokens": 20})]]),
        Workload("sixteen mixed requests", [batch]),
        Workload("requests one by one", [[request] for request in batch[:5]]),
        Workload("max_new_tokens inside a block", [budgets]),
        Workload("shared prefixes", hits + hits),
        Workload(
            "long prompts", [[(prompt(long, 300 + i), {"max_new_tokens": 16}) for i in (0, 1)]]
        ),
    ]


def dependent_workloads(
    prompt: Callable[[int, int], list[int]], answers: list[Answer], *, context: int
) -> list[Workload]:
    """Return workloads made from what plain decoding answered to the mixed batch's prompts.

    Args:
        prompt: (length, seed) -> token ids.
        answers: to `[(prompt(12, 1), 64 tokens)]`, plain.
        context: the engine's context length.
    """
    first = prompt(12, 1)
    answer = answers[0]
    stops = [
        (first, {"max_new_tokens": 64, "stop_token_ids": [answer.tokens[k]]}) for k in range(1, 14)
    ]
    # A string that begins about where the token stands: either may come first, in one block.
    either = [
        (first, {**stop, "stop": answer.text[at : at + 2]})
        for k, (_, stop) in enumerate(stops, start=1)
        for at in (len(answer.text) * k // 64 + more for more in (0, 1, 3, 5))
        if answer.text[at : at + 2].strip()
    ]
    strings = [
        (first, {"max_new_tokens": 64, "ignore_eos": True, "stop": answer.text[k : k + 3]})
        for k in range(3, len(answer.text) - 3, max(1, len(answer.text) // 9))
    ]
    turn = first + answer.tokens[:30] + prompt(5, 400)
    limit = {"max_new_tokens": None, "ignore_eos": True}
    return [
        Workload("stop token inside a block", [stops]),
        Workload("stop string inside a block", [strings]),
        Workload("stop token and stop string inside a block", [either[:24], either[24:]]),
        Workload(
            "second turn",
            [
                [(first, {"max_new_tokens": 30, "ignore_eos": True})],
                [(turn, {"max_new_tokens": 30, "ignore_eos": True})],
            ],
        ),
        Workload(
            "context limit inside a block",
            [[(prompt(context - left, 500 + left), limit) for left in (7, 8, 9, 12, 17, 40)]],
        ),
    ]


def option_workloads(
    prompt: Callable[[int, int], list[int]], answers: list[Answer], *, real_text: bool
) -> list[Workload]:
    """Return workloads with every sampling option, greedy and seeded, in batches that mix them.

    Args:
        prompt: (length, seed) -> token ids.
        answers: some that plain decoding gave, for tokens that are likely.
        real_text: whether the vocabulary is that of a real model: a part of the product must do.
    """
    tokens = torch.tensor([token for answer in answers for token in answer.tokens])
    common, counts = tokens.unique(return_counts=True)
    likely = common[counts.argsort(descending=True)].tolist()
    greedy = greedy_requests(prompt, likely[:2], likely)
    seeded = seeded_requests(prompt, likely[:2])
    if real_text:
        greedy, seeded = greedy[: len(greedy) // 2], seeded[:32]
    rounds = [seeded[start : start + 24] for start in range(0, len(seeded), 24)]
    return [Workload("greedy options", [greedy]), Workload("seeded options", rounds)]
