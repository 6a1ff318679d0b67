# SPDX-License-Identifier: Apache-2.0
"""Sampled texts follow the law of plain decoding, and log-probabilities are its own."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import dflash_options, engine, prompts_for, with_test_plugin
from laws import two_sample_p_value
from pairs import Pair
from workloads import flush

pytestmark = pytest.mark.slow

BLOCK_SIZE = 8
SAMPLES = int(os.environ.get("DFLASH_SAMPLES", "1500"))  # of each kind of request
ALPHA = 1e-6
# A batch has requests of all kinds, greedy ones too, so the rules are mixed in it.
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "top-k and top-p": {"temperature": 1.2, "top_k": 12, "top_p": 0.9},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    "greedy": {"temperature": 0.0},
}
Counts = dict[str, collections.Counter]


def texts(started: Any, ids: list[int], samples: int = SAMPLES) -> Counts:
    """Return how often each text of four tokens came, by kind; the last three are verified."""
    counts: Counts = {kind: collections.Counter() for kind in KINDS}
    requests = list(KINDS.items()) * samples
    for start in range(0, len(requests), 500):
        part = requests[start : start + 500]
        outputs = started.generate(
            input_ids=[ids] * len(part),
            sampling_params=[
                {**params, "max_new_tokens": 4, "ignore_eos": True} for _, params in part
            ],
        )
        for (kind, _), output in zip(part, outputs, strict=True):
            counts[kind][tuple(output["output_ids"])] += 1
    return counts


def p_value(first: Counts, second: Counts, kind: str) -> float:
    """Return how probable it is that two sets of texts came from one law."""
    keys = sorted(set(first[kind]) | set(second[kind]))
    return two_sample_p_value(*([counts[kind][key] for key in keys] for counts in (first, second)))


@pytest.fixture(scope="module")
def ids(llama_pair: Pair) -> list[int]:
    """The prompt of all."""
    return prompts_for(llama_pair)(9, 26)


@pytest.fixture(scope="module")
def plain(llama_pair: Pair, ids: list[int]) -> tuple[Counts, list[dict[str, Any]]]:
    """Plain decoding's texts, and its answers with log-probabilities."""
    with engine(llama_pair, disable_overlap_schedule=True, max_running_requests=128) as started:
        return texts(started, ids), with_logprobs(started, ids)


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that names the rule."""
    file = tmp_path_factory.mktemp("mutant") / "name"
    file.write_text("right")
    return file


@pytest.fixture(scope="module")
def served(llama_pair: Pair, plain: Any, rule: Path) -> Iterator[Any]:
    """DFLASH, with a plugin that can make its rule wrong.

    The rows of a step, their number drawn at random, are the most likely ones. Of a confidence that
    looked at what was drawn, too little shows in these texts: see tests/unit/test_proposer.py.
    """
    environment = with_test_plugin(
        DFLASH_MUTANT_FILE=str(rule), DFLASH_LATE="random", SGLANG_DFLASH_BUDGET="measured"
    )
    options = dflash_options(llama_pair, BLOCK_SIZE)
    with engine(
        llama_pair, environment=environment, **options, max_running_requests=128
    ) as started:
        yield started
        flush(started)


@pytest.fixture(scope="module")
def sampled(served: Any, ids: list[int]) -> Counts:
    """DFLASH's texts."""
    return texts(served, ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "greedy"])
def test_texts_follow_the_law_of_plain_decoding(plain: Any, sampled: Counts, kind: str) -> None:
    assert len(sampled[kind]) > 20, "a law of few texts would show nothing"
    assert p_value(plain[0], sampled, kind) > ALPHA


def test_greedy_requests_among_sampled_ones_stay_greedy(plain: Any, sampled: Counts) -> None:
    assert len(plain[0]["greedy"]) == 1
    assert sampled["greedy"] == plain[0]["greedy"]


@pytest.mark.parametrize("mutant", ["p instead of p/q", "q not subtracted"])
def test_a_wrong_rule_would_be_seen(
    plain: Any, served: Any, rule: Path, ids: list[int], mutant: str
) -> None:
    rule.write_text(mutant)
    wrong = texts(served, ids, samples=max(1500, SAMPLES // 4))
    rule.write_text("right")
    assert min(p_value(plain[0], wrong, kind) for kind in KINDS if kind != "greedy") < ALPHA


def test_another_temperature_would_be_seen(plain: Any, served: Any, ids: list[int]) -> None:
    outputs = served.generate(
        input_ids=[ids] * 1000,
        sampling_params={"temperature": 1.1, "max_new_tokens": 4, "ignore_eos": True},
    )
    other = {"temperature": collections.Counter(tuple(o["output_ids"]) for o in outputs)}
    assert p_value(plain[0], other, "temperature") < ALPHA


def with_logprobs(started: Any, ids: list[int]) -> list[dict[str, Any]]:
    """Return answers to greedy requests with all the log-probabilities that can be asked for."""
    options = [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {"65": 4.0, "97": -100.0}},
        {"regex": "[a-z]{30}"},
    ]
    return started.generate(
        input_ids=[ids[i:] for i in range(len(options))],
        sampling_params=[
            {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True, **each} for each in options
        ],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=5,
        token_ids_logprob=[[65, 97, 101]] * len(options),
    )


def test_logprobs_are_those_of_plain_decoding(plain: Any, served: Any, ids: list[int]) -> None:
    answers = with_logprobs(served, ids)
    accepted = [answer["meta_info"]["spec_num_correct_drafts"] for answer in answers]
    assert sum(accepted) > 8, "accepted tokens and bonus tokens both"
    for expected, found in zip(plain[1], answers, strict=True):
        assert found["output_ids"] == expected["output_ids"]
        for name in (
            "input_token_logprobs",
            "output_token_logprobs",
            "output_top_logprobs",
            "output_token_ids_logprobs",
        ):
            same_logprobs(expected["meta_info"][name], found["meta_info"][name])


def same_logprobs(expected: list[Any], found: list[Any]) -> None:
    """Compare lists, or lists of lists, of (log-probability, token, text)."""
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, list):
            same_logprobs(one, other)
        elif one[0] is None:
            assert other[0] is None
        else:
            assert other[1] == one[1]
            assert other[0] == pytest.approx(one[0], abs=2e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_logprobs_of_a_sampled_text_are_those_of_its_tokens(
    served: Any, ids: list[int], temperature: float
) -> None:
    """Scored again in one prefill, the text has the log-probabilities that came with it."""
    params = {"temperature": temperature, "max_new_tokens": 40, "ignore_eos": True}
    output = served.generate(
        input_ids=ids, sampling_params=params, return_logprob=True, top_logprobs_num=3
    )
    text = output["output_ids"]
    for values in output["meta_info"]["output_top_logprobs"]:
        assert [value[0] for value in values] == sorted((v[0] for v in values), reverse=True)
    for place in (0, 1, 7, 20, 38):
        one = served.generate(
            input_ids=ids + text[:place],
            sampling_params={"temperature": temperature, "max_new_tokens": 1},
            return_logprob=True,
            token_ids_logprob=[text[place]],
        )
        expected = one["meta_info"]["output_token_ids_logprobs"][0][0][0]
        found = output["meta_info"]["output_token_logprobs"][place][0]
        assert found == pytest.approx(expected, abs=2e-4)
