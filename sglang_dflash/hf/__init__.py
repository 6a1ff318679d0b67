# SPDX-License-Identifier: Apache-2.0
"""DFlash on transformers, without SGLang: a back end of its own, and the oracle of the tests."""

from __future__ import annotations

from sglang_dflash.hf.draft import DraftContext, HFDraft, load_draft
from sglang_dflash.hf.generate import Generation, context_features, spec_generate

__all__ = [
    "DraftContext",
    "Generation",
    "HFDraft",
    "context_features",
    "load_draft",
    "spec_generate",
]
