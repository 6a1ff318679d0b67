# SPDX-License-Identifier: Apache-2.0
"""What a batch is sampled with once requests that asked for more have left it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_dflash.verify.decide import options_of

VOCAB = 5
FLAGS = ["is_all_greedy", "need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"]


def request(**params: Any) -> SimpleNamespace:
    """A request as the scheduler has it."""
    asked = SamplingParams(**params)
    asked.normalize(None)
    return SimpleNamespace(sampling_params=asked)


def info_of(requests: list[SimpleNamespace]) -> SamplingBatchInfo:
    """What SGLang still says of them beside a request that asked for everything."""
    asked = [each.sampling_params for each in requests]
    return SamplingBatchInfo(
        temperatures=torch.tensor([[params.temperature] for params in asked]),
        top_ps=torch.tensor([params.top_p for params in asked]),
        top_ks=torch.tensor([params.top_k for params in asked]),
        min_ps=torch.tensor([params.min_p for params in asked]),
        is_all_greedy=False,
        is_any_greedy=True,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        npu_top_k_top_p_eligible=False,
        max_top_k=None,
        vocab_size=VOCAB,
        logit_bias=torch.zeros(len(requests), VOCAB),
    )


@pytest.mark.parametrize(
    ("asked", "flags", "max_top_k"),
    [
        ([{"temperature": 0}, {"temperature": 0}], (True, True, False, False), 1),
        ([{"temperature": 0}, {}], (False, True, False, False), None),
        ([{"temperature": 0.7}], (False, False, False, False), None),
        ([{"top_k": 7}, {"temperature": 0}, {"top_k": 3}], (False, True, False, False), 7),
        ([{"top_k": 7}, {"top_p": 0.9}], (False, True, True, False), None),
        ([{"min_p": 0.1}], (False, False, False, True), None),
    ],
)
def test_what_left_requests_asked_for_is_not_done(
    asked: list[dict[str, Any]], flags: tuple[bool, ...], max_top_k: int | None
) -> None:
    requests = [request(**params) for params in asked]
    before = info_of(requests)
    found = options_of(before, requests)
    assert tuple(getattr(found, name) for name in FLAGS) == flags
    assert found.max_top_k == max_top_k
    assert found.logit_bias is None
    assert before.logit_bias is not None, "the scheduler's own stays"


def test_a_bias_that_is_still_asked_for_stays() -> None:
    requests = [request(temperature=0), request(logit_bias={"3": 1.0})]
    assert options_of(info_of(requests), requests).logit_bias is not None
    assert request().sampling_params.top_k == TOP_K_ALL
