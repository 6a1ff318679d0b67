# SPDX-License-Identifier: Apache-2.0
"""Requests with every sampling option that changes what is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
)

__all__ = ["NoRepeat", "greedy_requests", "seeded_requests"]

Prompt = Callable[[int, int], list[int]]  # (length, seed) -> token ids
Request = tuple[list[int], dict[str, Any]]

PENALTIES: list[dict[str, float]] = [
    {},
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.9},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.3, "presence_penalty": 0.4, "repetition_penalty": 1.2},
]
_JSON = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},'
_JSON += ' "required": ["a", "b"], "additionalProperties": false}'


class NoRepeat(CustomLogitProcessor):
    """Forbids the last `width` tokens of the output: it must know them all, and in order."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Forbid each row's tokens.

        Args:
            logits: [rows, V].
            custom_param_list: one a row.
        """
        assert custom_param_list is not None
        for row, params in zip(logits, custom_param_list, strict=True):
            recent = params["__req__"].output_ids[-params["width"] :]
            row[recent] = float("-inf")
        return logits


def seeded_requests(prompt: Prompt, stop_ids: list[int]) -> list[Request]:
    """Return one request for each point of the options' product, each with a seed of its own.

    Args:
        prompt: maker of prompts.
        stop_ids: tokens that end a request, frequent enough to end some: what `min_new_tokens`
            holds off.
    """
    product = itertools.product((0.3, 0.7, 1.0, 1.5), (None, 1, 20), (1.0, 0.9), PENALTIES, (0, 20))
    requests = []
    for number, (temperature, top_k, top_p, penalties, minimum) in enumerate(product):
        params: dict[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "sampling_seed": 1000 + number,
            "max_new_tokens": 40,
            "stop_token_ids": stop_ids,
            "min_new_tokens": minimum,
            **penalties,
        }
        if top_k is not None:
            params["top_k"] = top_k
        requests.append((prompt(4 + number % 13, 700 + number), params))
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(5)).tolist()
    return [requests[i] for i in order]  # every batch mixes them


def greedy_requests(prompt: Prompt, stop_ids: list[int], vocabulary: list[int]) -> list[Request]:
    """Return greedy requests with each option, and with several.

    Args:
        prompt: maker of prompts.
        stop_ids: frequent tokens that end a request.
        vocabulary: tokens that a bias may favour or forbid.
    """
    forbid = {str(token): -100.0 for token in vocabulary[:5]}
    favour = {str(vocabulary[7]): 3.0, str(vocabulary[9]): 2.0}
    no_pairs = {
        "custom_logit_processor": DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
        "custom_params": {"ngram_size": 2, "window_size": 60},
    }
    no_repeat = {"custom_logit_processor": NoRepeat.to_str(), "custom_params": {"width": 4}}
    options: list[dict[str, Any]] = [
        *PENALTIES,
        {"repetition_penalty": 0.8},
        {"frequency_penalty": -0.5},
        {"stop_token_ids": stop_ids, "min_new_tokens": 7},
        {"stop_token_ids": stop_ids, "min_new_tokens": 20, **PENALTIES[-1]},
        {"logit_bias": forbid},
        {"logit_bias": favour, **PENALTIES[1]},
        {"json_schema": _JSON},
        {"json_schema": _JSON, **PENALTIES[3]},
        {"regex": "[a-m ]{12}(x|y)[0-9]+"},
        {"ebnf": 'root ::= ("ab" | "cd" | [n-z])+ "."', "logit_bias": forbid},
        no_repeat,
        {**no_repeat, **PENALTIES[-1]},
        no_pairs,
    ]
    return [
        (prompt(5 + i % 9, 900 + i), {"temperature": 0, "max_new_tokens": 48, **each})
        for i, each in enumerate(options * 2)
    ]
