# SPDX-License-Identifier: Apache-2.0
"""What is served, what is refused, and in which words."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_dflash.admission import refusal


@dataclasses.dataclass
class Params:
    """The fields of SGLang's SamplingParams that are read, at their defaults when greedy."""

    top_k: int = 1
    min_p: float = 0.0


@dataclasses.dataclass
class Request:
    """The fields of SGLang's Req that are read."""

    sampling_params: Params = dataclasses.field(default_factory=Params)
    origin_input_ids: list[int] = dataclasses.field(default_factory=lambda: [1])
    return_hidden_states: bool = False
    return_sampling_mask: bool = False


@pytest.mark.parametrize("deterministic", [False, True])
def test_greedy_and_sampled_requests_are_served(deterministic: bool) -> None:
    assert refusal(Request(), deterministic=deterministic) is None
    assert refusal(Request(Params(top_k=1 << 30)), deterministic=deterministic) is None


def test_min_p_is_served_where_nothing_is_seeded() -> None:
    request = Request(Params(top_k=1 << 30, min_p=0.1))
    assert refusal(request, deterministic=False) is None
    message = refusal(request, deterministic=True)
    assert message is not None
    assert message.startswith("min_p=0.1: ")
    assert "--enable-deterministic-inference" in message


def test_all_that_is_not_served_is_named_at_once() -> None:
    request = Request(return_hidden_states=True, return_sampling_mask=True)
    message = refusal(request, deterministic=False)
    assert message is not None
    assert "return_hidden_states, return_sampling_mask" in message


def test_an_empty_prompt_is_refused() -> None:
    message = refusal(Request(origin_input_ids=[]), deterministic=False)
    assert message == "The prompt is empty. Send at least one token, such as the model's BOS."
