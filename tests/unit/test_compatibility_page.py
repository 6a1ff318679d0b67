# SPDX-License-Identifier: Apache-2.0
"""What docs/compatibility.md says of who serves what is what the routing does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import sglang_dflash
from sglang_dflash.draft.schema import ARCHITECTURES
from sglang_dflash.options import Options
from sglang_dflash.routing import Target, upstream_reason

BUNDLED = Path(sglang_dflash.__file__).parent / "assets" / "smollm2-135m-dflash-b8"
PAGE = Path(__file__).parents[2] / "docs/compatibility.md"


@dataclass(frozen=True)
class EverythingAsked:
    """SGLang's settings by name, with all that the plugin leaves to SGLang's worker."""

    speculative_draft_model_path: str = str(BUNDLED)
    speculative_draft_model_revision: None = None
    speculative_draft_window_size: int = 64
    speculative_use_block_verification: bool = True
    enable_lora: bool = True
    lora_paths: tuple[str, ...] = ("adapter",)
    enable_strict_thinking: bool = True
    attn_dp_size: int = 2
    attn_cp_size: int = 2
    dcp_size: int = 2
    enable_prefill_cp: bool = True
    enable_unified_memory: bool = True
    disaggregation_mode: str = "prefill"
    _speculative_draft_quantization_explicitly_set: bool = True
    speculative_draft_model_quantization: str = "fp8"


def test_the_page_names_every_architecture_that_is_served() -> None:
    section = PAGE.read_text().split("## Drafts")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    served = {name for row in rows for name in re.findall(r"`(\w+DraftModel)`", row)}
    assert served == set(ARCHITECTURES)


def test_the_page_names_every_option_that_sglang_s_worker_serves() -> None:
    target = Target(64, 320, 4, 1024, has_recurrent_state=True)
    reason = upstream_reason(EverythingAsked(), Options(), target)
    assert reason is not None
    named = set(re.findall(r"--[a-z-]+", reason))
    assert len(named) == 12
    section = PAGE.read_text().split("## Who serves what")[1].split("\n## ")[0]
    assert named <= set(re.findall(r"--[a-z-]+", section))
