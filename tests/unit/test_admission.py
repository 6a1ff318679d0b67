# SPDX-License-Identifier: Apache-2.0
"""What is served, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sglang_dflash.admission import refusal
from sglang_dflash.options import Options


@dataclasses.dataclass
class Params:
    """The fields of SGLang's SamplingParams that are read, at their defaults when greedy."""

    top_k: int = 1
    temperature: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: dict | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    beam_width: int | None = None


@dataclasses.dataclass
class Request:
    """The fields of SGLang's Req that are read."""

    sampling_params: Params = dataclasses.field(default_factory=Params)
    custom_logit_processor: str | None = None
    return_logprob: bool = False
    return_hidden_states: bool = False
    return_sampling_mask: bool = False


def test_a_greedy_request_is_served() -> None:
    assert refusal(Request()) is None


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"top_k": 20, "temperature": 0.7}, "temperature=0.7"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"presence_penalty": -1.0}, "presence_penalty=-1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"min_new_tokens": 4}, "min_new_tokens=4"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"beam_width": 4}, "beam_width=4"),
    ],
)
def test_a_sampling_option_is_refused_by_name(params: dict[str, Any], name: str) -> None:
    message = refusal(Request(Params(**params)))
    assert message is not None
    assert f"asks for {name}." in message


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("custom_logit_processor", "x", "custom_logit_processor"),
        ("return_logprob", True, "logprobs"),
        ("return_hidden_states", True, "return_hidden_states"),
        ("return_sampling_mask", True, "return_sampling_mask"),
    ],
)
def test_a_request_option_is_refused_by_name(field: str, value: Any, name: str) -> None:
    message = refusal(Request(**{field: value}))
    assert message is not None
    assert name in message


def test_all_reasons_are_named_at_once() -> None:
    message = refusal(Request(Params(top_k=5, min_new_tokens=2), return_logprob=True))
    assert message is not None
    assert "temperature=1, min_new_tokens=2, logprobs" in message


def test_options_are_read_from_the_environment() -> None:
    assert Options.from_env({}).worker == "plugin"
    assert Options.from_env({"SGLANG_DFLASH_WORKER": "Upstream"}).worker == "upstream"


def test_an_unknown_worker_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"SGLANG_DFLASH_WORKER='mine' .* plugin, upstream"):
        Options.from_env({"SGLANG_DFLASH_WORKER": "mine"})
