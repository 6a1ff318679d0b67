# SPDX-License-Identifier: Apache-2.0
"""A request alone in a small K/V pool: it ends by length, or is refused when it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import Prompt, dflash_options, engine, prompts_for
from pairs import Pair
from workloads import flush

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
POOL = 320


@pytest.fixture(scope="module", params=[1, 16], ids=["tokens", "pages of 16"])
def served(request: pytest.FixtureRequest, llama_pair: Pair) -> Iterator[Any]:
    """DFLASH whose context is longer than its pool."""
    options = dflash_options(llama_pair, BLOCK_SIZE)
    with engine(
        llama_pair,
        **options,
        context_length=512,
        max_total_tokens=POOL,
        page_size=request.param,
    ) as started:
        yield started


@pytest.fixture
def prompt(llama_pair: Pair) -> Prompt:
    return prompts_for(llama_pair)


def ask(served: Any, ids: list[int], **params: Any) -> dict[str, Any]:
    flush(served)
    answer = served.generate(
        input_ids=ids, sampling_params={"temperature": 0, "ignore_eos": True, **params}
    )
    return answer["meta_info"] | {"tokens": answer["output_ids"]}


def test_a_request_that_fills_the_pool_ends_by_length(served: Any, prompt: Prompt) -> None:
    answer = ask(served, prompt(200, 1), max_new_tokens=110)
    assert answer["finish_reason"]["type"] == "length"
    # The prompt in whole pages, two blocks for a step, a page and a token that SGLang keeps free.
    page = served.server_args.page_size
    assert len(answer["tokens"]) == POOL - -(-200 // page) * page - 2 * BLOCK_SIZE - page - 1


def test_a_prompt_beside_which_no_step_fits_is_refused(served: Any, prompt: Prompt) -> None:
    with pytest.raises(ValueError, match="exceeds the KV memory budget"):
        ask(served, prompt(287, 2), max_new_tokens=5)
    assert len(ask(served, prompt(287, 2), max_new_tokens=1)["tokens"]) == 1
    assert len(ask(served, prompt(20, 3), max_new_tokens=30)["tokens"]) == 30
