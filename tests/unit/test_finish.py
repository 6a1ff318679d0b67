# SPDX-License-Identifier: Apache-2.0
"""A run of tokens ends a real request where the same tokens one by one end it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pairs import Pair
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from sglang_dflash.finish import end_token_by_token

_FINISH = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer(llama_pair: Pair) -> Any:
    made = AutoTokenizer.from_pretrained(llama_pair.target)
    made.additional_stop_token_ids = None  # SGLang sets it where it loads one
    return made


def request(tokenizer: Any, options: dict[str, Any], vocab_size: int = 320) -> Req:
    params = SamplingParams(**{"max_new_tokens": NUM_TOKENS, **options})
    params.normalize(tokenizer)
    made = Req("r", "", [1, 2, 3], params, vocab_size=vocab_size)
    made.tokenizer = tokenizer
    return made


def feed(made: Req, tokens: list[int], widths: list[int], *, hooked: bool) -> None:
    """Commit tokens in runs of these widths, as SGLang's result processor does."""
    rest = iter(tokens)
    for width in widths:
        run = list(itertools.islice(rest, width))
        made.output_ids.extend(run)
        made.reasoning_tokens += len(run)  # as if it thought throughout
        if hooked:
            end_token_by_token(_FINISH, made, len(run))
        else:
            _FINISH(made, len(run))
        if made.finished() or not run:
            return


def ending(made: Req) -> tuple[Any, ...]:
    reason = made.finished_reason
    return (
        list(made.output_ids_through_stop),
        None if reason is None else reason.to_json(),
        made.reasoning_tokens if made.finished() else None,
    )


def random_options(tokens: list[int], tokenizer: Any, generator: torch.Generator) -> dict[str, Any]:
    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    text = tokenizer.decode(tokens)
    place = below(len(text) - 3)
    options: dict[str, Any] = {"max_new_tokens": 4 + below(NUM_TOKENS)}
    if below(3):
        options["stop"] = [text[place : place + 1 + below(3)]]
    if below(3):
        options["stop_token_ids"] = [tokens[below(NUM_TOKENS)]]
    if not below(3):
        options["stop_regex"] = [r"[A-F]$", r"\d{2}"][below(2)]
    if not below(4):
        options["ignore_eos"] = True
    return options


@pytest.mark.parametrize("seed", range(200))
def test_a_run_ends_where_its_tokens_one_by_one_end(seed: int, tokenizer: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(36, 110, (NUM_TOKENS,), generator=generator).tolist()
    options = random_options(tokens, tokenizer, generator)
    widths = torch.randint(1, 9, (NUM_TOKENS,), generator=generator).tolist()
    plain, ours = request(tokenizer, options), request(tokenizer, options)
    feed(plain, tokens, [1] * NUM_TOKENS, hooked=False)
    feed(ours, tokens, widths, hooked=True)
    assert ending(ours) == ending(plain)
    if not ours.finished():
        assert list(ours.output_ids) == tokens


def test_a_stop_string_behind_a_stop_token_does_not_win(tokenizer: Any) -> None:
    tokens = list(range(40, 40 + 8))
    options = {"stop_token_ids": [tokens[2]], "stop": [tokenizer.decode(tokens[4:5])]}
    sglang, ours = request(tokenizer, options), request(tokenizer, options)
    feed(sglang, tokens, [8], hooked=False)
    assert sglang.finished_reason.to_json()["matched"] == options["stop"][0]  # what is mended
    feed(ours, tokens, [8], hooked=True)
    assert ours.finished_reason.to_json()["matched"] == tokens[2]
    assert list(ours.output_ids_through_stop) == tokens[:3]
    assert list(ours.output_ids) == tokens, "what was committed is what K/V is held for"


class Grammar:
    """Stands behind the run, whose last token ends it."""

    def is_terminated(self) -> bool:
        return True


@pytest.mark.parametrize("options", [{}, {"stop": ["never said"]}])
def test_a_grammar_ends_a_run_at_its_last_token(options: dict, tokenizer: Any) -> None:
    made = request(tokenizer, {"ignore_eos": True, **options})
    made.grammar = Grammar()  # type: ignore[assignment]
    tokens = list(range(40, 46))
    feed(made, tokens, [6], hooked=True)
    assert list(made.output_ids_through_stop) == tokens
    assert made.finished_reason.to_json()["matched"] == tokens[-1]
    assert made.grammar is not None


def test_a_token_that_is_none_ends_a_run_there(tokenizer: Any) -> None:
    tokens = [40, 41, 999, 42]
    plain, ours = request(tokenizer, {}), request(tokenizer, {})
    feed(plain, tokens, [1] * 4, hooked=False)
    feed(ours, tokens, [4], hooked=True)
    assert ending(ours) == ending(plain)
    assert len(ours.output_ids_through_stop) == 3
