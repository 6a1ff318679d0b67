# SPDX-License-Identifier: Apache-2.0
"""Texts end where the installed SGLang ends an answer."""

from __future__ import annotations

from sglang.srt.utils.hf_transformers.common import _ADDITIONAL_STOP_TOKEN_TEXTS

from sglang_dflash.training import target


def test_a_turn_ends_at_the_texts_that_sglang_adds() -> None:
    assert target._TURN_ENDS == _ADDITIONAL_STOP_TOKEN_TEXTS
