# SPDX-License-Identifier: Apache-2.0
"""DFLASH answers what plain decoding answers: token for token, reason for reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines import (
    CONTEXT,
    POOL_TOKENS,
    Case,
    Prompt,
    dflash_options,
    engine,
    environment_of,
    prompts_for,
)
from pairs import Pair
from transformers import AutoModelForCausalLM
from workloads import (
    Answer,
    Workload,
    as_answer,
    ask,
    dependent_workloads,
    flush,
    option_workloads,
    plain_workloads,
)

from sglang_dflash.hf import load_draft, spec_generate

pytestmark = pytest.mark.slow

# Seeds are honoured, so that sampled texts can be compared too; greedy ones stay as they are.
EXACT = {"enable_deterministic_inference": True, "enable_custom_logit_processor": True}
USUAL = {"enable_deterministic_inference": False}  # the arithmetic without that option
LONG = 90  # tokens; the chunked cases prefill 32 at a time
CASES = [
    Case("llama, block 8", "llama_pair", 8, all_seeds=True),
    Case("llama, block 2, pages of 16, chunks of 32", "llama_pair", 2,
         {"page_size": 16, "chunked_prefill_size": 32, "enable_streaming_session": True},
         widths="random"),
    Case("llama, block 3, no overlap, chunks of 32, usual arithmetic", "llama_pair", 3,
         {"disable_overlap_schedule": True, "chunked_prefill_size": 32,
          "enable_streaming_session": True, **USUAL}),
    Case("llama, block 16, no radix cache", "llama_pair", 16, {"disable_radix_cache": True}),
    Case("llama, windowed draft, block 8, usual arithmetic", "windowed_pair", 8, USUAL),
    Case("llama, two ranks, block 8, a token map, late", "llama_pair", 8, {"tp_size": 2},
         widths="random late", token_map=True),
    Case("qwen3, DFlash2, block 8, pages of 16, a token map, usual arithmetic", "dflash2_pair", 8,
         {"disable_overlap_schedule": True, "page_size": 16, **USUAL}, widths="random",
         token_map=True),
    Case("qwen3, DFlash2, block 8", "dflash2_pair", 8),
    Case("qwen3, block 16, small pool", "qwen3_pair", 16,
         {"max_total_tokens": 700, "schedule_conservativeness": 0.01}, widths="random",
         all_seeds=True),
    Case("qwen3, block 3, mixed chunks of 32", "qwen3_pair", 3,
         {"chunked_prefill_size": 32, "enable_mixed_chunk": True}, all_seeds=True),
    # Near-ties are frequent in bfloat16: a logit that depends on its batch changes the text.
    # Two threads against plain decoding's one; and drafts in every step, worth it or not.
    Case("smollm2, bfloat16, block 8", "smollm2_pair", 8, {"dtype": "bfloat16"},
         widths="measured",
         environment={"OMP_NUM_THREADS": "2", "SGLANG_DFLASH_MIN_WIDTH": "2"}),
    Case("smollm2, bfloat16, block 8, late", "smollm2_pair", 8, {"dtype": "bfloat16"},
         widths="measured late"),
]  # fmt: skip
WORKLOADS = [
    "one request",
    "one token prompt",
    "sixteen mixed requests",
    "requests one by one",
    "max_new_tokens inside a block",
    "shared prefixes",
    "long prompts",
    "stop token inside a block",
    "stop string inside a block",
    "stop token and stop string inside a block",
    "second turn",
    "context limit inside a block",
    "greedy options",
    "seeded options",
]
_plain: dict[str, dict[str, tuple[Workload, list[Answer]]]] = {}


def plain_answers(pair: Pair, dtype: str) -> dict[str, tuple[Workload, list[Answer]]]:
    """Return each workload with plain decoding's answers; one engine a target and dtype.

    Without overlap: with it SGLang's penalties and custom processors lag a token behind.
    """
    key = f"{pair.target} {dtype}"
    if key not in _plain:
        prompt = prompts_for(pair)
        with engine(pair, dtype=dtype, disable_overlap_schedule=True, **EXACT) as started:
            answers = {w.name: (w, ask(started, w)) for w in plain_workloads(prompt, long=LONG)}
            more = dependent_workloads(prompt, answers["one request"][1], context=CONTEXT)
            more += option_workloads(
                prompt, answers["sixteen mixed requests"][1], real_text="smollm2" in key
            )
            answers |= {w.name: (w, ask(started, w)) for w in more}
        _plain[key] = answers
    return _plain[key]


class Served:
    """A DFLASH engine and what plain decoding answered."""

    def __init__(
        self,
        case: Case,
        started: Any,
        plain: dict[str, tuple[Workload, list[Answer]]],
        prompt: Prompt,
    ) -> None:
        self.case, self.engine, self.plain, self.prompt = case, started, plain, prompt
        self.heeds_seeds = case.options.get("enable_deterministic_inference", True)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each case's engine, one after the other."""
    case = request.param
    pair = request.getfixturevalue(case.pair)
    plain = plain_answers(pair, case.options.get("dtype", "float32"))
    options = {**EXACT, **dflash_options(pair, case.block_size), **case.options}
    if case.token_map:  # more tokens of the first rank's shard than of the second's
        path = tmp_path_factory.mktemp("map") / "tokens.pt"
        torch.save([*range(0, 120, 2), *range(200, 320, 5)], path)
        options["speculative_token_map"] = str(path)
    with engine(pair, environment=environment_of(case), **options) as started:
        yield Served(case, started, plain, prompts_for(pair))


@pytest.fixture(autouse=True)
def nothing_leaks(served: Served) -> Iterator[None]:
    """After each test all slots are free again: a flush succeeds and the engine still answers.

    The scheduler itself checks its books whenever it is idle and dies where they do not balance.
    """
    yield
    flush(served.engine)
    output = served.engine.generate(
        input_ids=served.prompt(3, 9), sampling_params={"temperature": 0, "max_new_tokens": 2}
    )
    assert len(output["output_ids"]) >= 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_answers_are_those_of_plain_decoding(served: Served, name: str) -> None:
    workload, expected = served.plain[name]
    if name == "seeded options" and not served.heeds_seeds:
        pytest.skip("SGLang heeds no seed without --enable-deterministic-inference")
    if name == "seeded options" and not served.case.all_seeds:
        workload = Workload(name, workload.rounds[:3])
        expected = expected[: sum(map(len, workload.rounds))]
    assert ask(served.engine, workload) == expected


def test_drafts_are_accepted(served: Served) -> None:
    answers = ask(served.engine, served.plain["sixteen mixed requests"][0])
    steps = sum(a.meta.get("spec_verify_ct", 0) for a in answers)
    tokens = sum(len(a.tokens) - 1 for a in answers if a.meta.get("spec_verify_ct"))
    widths = served.case.widths.removesuffix(" late")
    may_be_plain = widths == "measured" and not served.case.environment
    least = 1.0 if may_be_plain else {"whole": 1.25, "random": 1.1, "measured": 1.1}[widths]
    assert tokens / steps >= least, "acceptance length"


def test_acceptance_is_that_of_the_reference(
    served: Served, request: pytest.FixtureRequest
) -> None:
    """The transformers reference takes the same number of steps for the same text."""
    if served.case.widths != "whole":
        pytest.skip("whole blocks are compared")
    pair = request.getfixturevalue(served.case.pair)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    draft = load_draft(pair.draft, dtype=torch.float32)
    ids = served.prompt(12, 1)
    expected = spec_generate(
        draft,
        target,
        torch.tensor([ids]),
        max_new_tokens=40,
        stop_token_ids=(),
        block_size=served.case.block_size,
    )
    request_ = (ids, {"max_new_tokens": 40, "ignore_eos": True})
    (answer,) = ask(served.engine, Workload("", [[request_]]))
    assert answer.tokens == list(expected.tokens)
    assert answer.meta["spec_verify_ct"] == len(expected.acceptance_lengths)


def test_a_prefix_hit_accepts_as_many_as_a_cold_start(served: Served) -> None:
    request = (served.prompt(LONG, 11), {"max_new_tokens": 40, "ignore_eos": True})
    cold, hit = ask(served.engine, Workload("", [[request], [request]]))
    radix = not served.case.options.get("disable_radix_cache", False)
    assert (hit.meta["cached_tokens"] > 0) == radix
    assert hit == cold
    if served.case.widths == "whole":
        assert hit.meta["spec_verify_ct"] == cold.meta["spec_verify_ct"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_sessions_next_turn_sees_what_the_client_saw(served: Served, streaming: bool) -> None:
    """Turns that end at any place of a block, by length and by a stop token."""
    if streaming and not served.case.options.get("enable_streaming_session"):
        pytest.skip("SGLang opens none without --enable-streaming-session; two cases have it")
    first, more = served.prompt(12, 1), served.prompt(5, 400)
    answer = served.plain["one request"][1][0]
    ends = [{"max_new_tokens": length} for length in range(3, 9)]
    ends += [{"stop_token_ids": [answer.tokens[place]]} for place in range(1, 7)]
    for end in ends:
        params = {"temperature": 0, "max_new_tokens": 40, **end}
        session = served.engine.open_session(1000, streaming=streaming)
        turn = served.engine.generate(
            input_ids=first, sampling_params=params, session_params={"id": session, "rid": None}
        )
        here = {"id": session, "rid": None if streaming else turn["meta_info"]["id"]}
        then = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        found = served.engine.generate(input_ids=more, sampling_params=then, session_params=here)
        served.engine.close_session(session)
        alone = served.engine.generate(
            input_ids=first + turn["output_ids"] + more, sampling_params=then
        )
        assert found["output_ids"] == alone["output_ids"], end


def test_two_samples_of_a_greedy_request_are_equal(served: Served) -> None:
    expected = served.plain["one request"][1][0].tokens[:20]
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True, "n": 2}
    outputs = served.engine.generate(input_ids=served.prompt(12, 1), sampling_params=params)
    assert [o["output_ids"] for o in outputs] == [expected, expected]


def test_streaming_gives_the_same_text(served: Served) -> None:
    expected = served.plain["one request"][1][0]
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    chunks = list(
        served.engine.generate(input_ids=served.prompt(12, 1), sampling_params=params, stream=True)
    )
    assert len(chunks) > 1
    assert as_answer(chunks[-1]).text == expected.text


def test_an_abort_leaves_its_neighbours_alone(served: Served) -> None:
    workload, expected = served.plain["sixteen mixed requests"]
    requests = workload.rounds[0][:6]

    async def run() -> list[Any]:
        tasks = [_abort_midway(served.engine, served.prompt(20, 13))]
        tasks += [
            served.engine.async_generate(
                input_ids=ids, sampling_params={"temperature": 0, **params}
            )
            for ids, params in requests
        ]
        return await asyncio.gather(*tasks)

    aborted, *outputs = served.engine.loop.run_until_complete(run())
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert [as_answer(output) for output in outputs] == expected[:6]


async def _abort_midway(started: Any, ids: list[int]) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    stream = await started.async_generate(
        input_ids=ids, sampling_params=params, stream=True, rid="to-abort"
    )
    last: dict[str, Any] = {}
    async for chunk in stream:
        if not last:
            started.tokenizer_manager.abort_request(rid="to-abort")
        last = chunk
    return last


def test_retracted_requests_end_as_if_never_retracted(
    served: Served, request: pytest.FixtureRequest
) -> None:
    if served.case.options.get("max_total_tokens", POOL_TOKENS) >= POOL_TOKENS:
        pytest.skip("the pool is large enough for all")
    params = {"max_new_tokens": 120}  # with ignore_eos the scheduler admits only what surely fits
    workload = Workload("", [[(served.prompt(20, 600 + i), params) for i in range(8)]])
    answers = ask(served.engine, workload)
    assert sum(a.meta["num_retractions"] for a in answers) > 0
    one_by_one = Workload("", [[r] for r in workload.rounds[0]])
    assert answers == ask(served.engine, one_by_one)


def test_a_weight_update_of_the_target_leaves_the_text_as_it_was(
    served: Served, request: pytest.FixtureRequest
) -> None:
    pair = request.getfixturevalue(served.case.pair)
    flush(served.engine)  # the update refuses where the scheduler is still at its last step
    done, message = served.engine.update_weights_from_disk(str(pair.target))[:2]
    assert done, message
    workload, expected = served.plain["one request"]
    assert ask(served.engine, workload) == expected


def test_a_weight_update_of_the_draft_is_refused(served: Served) -> None:
    done, message = served.engine.begin_weight_update("draft")
    assert not done
    assert "keeps the weights it was started with" in message


def test_an_empty_prompt_among_others_is_refused(served: Served) -> None:
    with pytest.raises(ValueError, match="The prompt is empty"):
        served.engine.generate(
            input_ids=[[], served.prompt(5, 3)],
            sampling_params={"temperature": 0, "max_new_tokens": 3},
        )


def test_requests_that_cannot_be_exact_are_refused_by_name(served: Served) -> None:
    generate: Callable[..., Any] = served.engine.generate
    ids, params = served.prompt(5, 3), {"temperature": 0.7, "min_p": 0.1}
    if not served.heeds_seeds:  # then min_p can be exact, and is served
        answer = generate(
            input_ids=ids, sampling_params={**params, "max_new_tokens": 9, "ignore_eos": True}
        )
        assert len(answer["output_ids"]) == 9
        return
    with pytest.raises(ValueError, match=r"min_p=0\.1: .*top_p"):
        generate(input_ids=ids, sampling_params=params)
    # SGLang refuses this one itself, before it asks us, and runs it for a token.
    with pytest.raises(ValueError, match="session id nowhere does not exist"):
        generate(input_ids=ids, sampling_params=params, session_params={"id": "nowhere"})
