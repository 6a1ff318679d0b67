# SPDX-License-Identifier: Apache-2.0
"""With which attention back ends a GPU's steps may have unequal widths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.routing import check_back_end

HOPPER, BLACKWELL = 9, 10


def graphs(backend: str) -> SimpleNamespace:
    """SGLang's graph settings."""
    return SimpleNamespace(decode=SimpleNamespace(backend=backend))


def settings(**changes: Any) -> SimpleNamespace:
    """SGLang's settings as far as they matter here."""
    usual = {
        "attention_backend": "fa3",
        "decode_attention_backend": None,
        "prefill_attention_backend": None,
        "speculative_attention_mode": "prefill",
        "disable_cuda_graph": False,
        "cuda_graph_config": graphs("full"),
        "disable_cuda_graph_padding": False,
        "enable_two_batch_overlap": False,
    }
    return SimpleNamespace(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "generation"),
    [
        ({}, HOPPER),
        ({"attention_backend": "trtllm_mha"}, BLACKWELL),
        ({"attention_backend": "flashinfer", "prefill_attention_backend": "fa4"}, BLACKWELL),
        (
            {"decode_attention_backend": "fa3", "prefill_attention_backend": "triton",
             "speculative_attention_mode": "decode"},
            HOPPER,
        ),
    ],
)  # fmt: skip
def test_the_back_end_that_verifies_is_what_matters(
    changes: dict[str, Any], generation: int
) -> None:
    check_back_end(settings(**changes), generation)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_backend": "triton"}, "--attention-backend triton"),
        ({"attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
        ({"prefill_attention_backend": "flashinfer"}, "--prefill-attention-backend flashinfer"),
        ({"cuda_graph_config": graphs("disabled")}, "--cuda-graph-backend-decode disabled"),
        ({"disable_cuda_graph": True}, "--disable-cuda-graph:"),
        ({"disable_cuda_graph_padding": True}, "--disable-cuda-graph-padding"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        check_back_end(settings(**changes), HOPPER)
    assert "SGLANG_DFLASH_BUDGET" in str(refused.value)
