# SPDX-License-Identifier: Apache-2.0
"""A draft's rotary embedding is that of transformers and of SGLang, frequencies and amplitude."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from published import published, read
from sglang.srt.layers.rotary_embedding import get_rope
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.rope import rope_unsupported_reason, sglang_scaling
from sglang_dflash.hf.rope import rope_frequencies

HEAD_DIM = 64
# As published for Kimi-K2.5.
KIMI: dict[str, Any] = {
    "rope_type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
each_scaling = pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 256},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
         "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        KIMI,
        KIMI | {"mscale": 0.707, "factor": 40.0},
        KIMI | {"attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
         "attention_factor": 0.8},
    ],
)  # fmt: skip


def with_scaling(scaling: dict[str, Any]) -> DraftConfig:
    return read(head_dim=HEAD_DIM, rope_scaling=scaling, rope_theta=50000.0)


@each_scaling
def test_frequencies_and_amplitude_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    reference = LlamaConfig(head_dim=HEAD_DIM, rope_parameters=scaling | {"rope_theta": 50000.0})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, torch.device("cpu"))
    frequencies, our_factor = rope_frequencies(with_scaling(scaling))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)


@each_scaling
def test_tables_are_those_that_sglang_serves_with(scaling: dict[str, Any]) -> None:
    """Its own, made as the draft makes them: one row a position, cosines first."""
    config = with_scaling(scaling)
    tables = get_rope(
        HEAD_DIM,
        rotary_dim=config.rotary_dim,
        max_position=config.max_position_embeddings,
        base=config.rope_theta,
        rope_scaling=sglang_scaling(config.rope_scaling),
        is_neox_style=True,
    ).cos_sin_cache[:100]
    frequencies, factor = rope_frequencies(config)
    angles = torch.arange(100.0)[:, None] * frequencies
    expected = factor * torch.cat((angles.cos(), angles.sin()), dim=-1)
    torch.testing.assert_close(tables, expected, rtol=0, atol=1e-5)


def test_the_published_amplitudes() -> None:
    assert rope_frequencies(with_scaling(KIMI))[1] == 1.0
    uneven = with_scaling(KIMI | {"mscale": 2.0})
    assert rope_frequencies(uneven)[1] == pytest.approx(1.8317766 / 1.4158883)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        (LINEAR, LINEAR),
        (LINEAR | {"rope_theta": 1e6}, {"type": "linear", "factor": 2.0, "other": None}),
        (LINEAR, None),
        (LINEAR, {}),
        ({}, LINEAR),
        ({"rope_type": "linear", "type": "linear", "factor": 2.0}, None),
    ],
)
def test_a_scaling_may_be_stated_twice_alike(parameters: Any, scaling: Any) -> None:
    config = read(rope_parameters=parameters, rope_scaling=scaling)
    assert config.rope_scaling == LINEAR
    plain = read(rope_parameters={"rope_theta": 1e6}, rope_scaling={"rope_type": "default"})
    assert plain.rope_scaling is None


@pytest.mark.parametrize(
    ("parameters", "scaling", "words"),
    [
        ({"rope_theta": 1e6, "rope_type": "default"}, LINEAR, "rope_scaling .*linear.* differ"),
        ({"rope_theta": 1e6}, LINEAR, "rope_scaling .*linear.* differ"),
        (LINEAR, LINEAR | {"factor": 4.0}, "2.0.* rope_scaling .*4.0.* differ"),
        (LINEAR | {"type": "yarn"}, None, "rope_parameters has type 'yarn' and rope_type 'linear'"),
        (None, LINEAR | {"type": "su"}, "rope_scaling has type 'su' and rope_type 'linear'"),
        ({"rope_theta": 1e6}, {"rope_theta": 5e5}, "rope_theta is 1000000 but 500000.0"),
    ],
)
def test_a_scaling_stated_twice_and_not_alike_is_refused(
    parameters: Any, scaling: Any, words: str
) -> None:
    reason = rope_unsupported_reason(published(rope_parameters=parameters, rope_scaling=scaling))
    assert re.search(words, reason or "")
