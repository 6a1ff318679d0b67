# SPDX-License-Identifier: Apache-2.0
"""Who serves DFLASH: our worker, or SGLang's for what ours does not do."""

from __future__ import annotations

from typing import Any

from sglang_dflash.draft.checkpoint import check_checkpoint, draft_folder
from sglang_dflash.draft.checks import check_block_size
from sglang_dflash.draft.config import read_config, unsupported_reason
from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.options import Options

__all__ = ["check_start", "upstream_reason"]

_DRAFT_PATH = "--speculative-draft-model-path"


def upstream_reason(settings: Any, options: Options, *, hybrid_target: bool) -> str | None:
    """Return why SGLang's own worker must serve, or None when ours does.

    Args:
        settings: SGLang's resolved server arguments, read by name.
        options: the plugin's own.
        hybrid_target: whether the target keeps recurrent state (Mamba, GDN, ...).
    """
    if options.worker == "upstream":
        return "SGLANG_DFLASH_WORKER=upstream"
    asked = {
        "--speculative-draft-window-size": settings.speculative_draft_window_size is not None,
        "--speculative-use-block-verification": settings.speculative_use_block_verification,
        "--enable-lora": settings.enable_lora,
        "--enable-dp-attention": settings.enable_dp_attention,
        "--disaggregation-mode": settings.disaggregation_mode not in (None, "null"),
        "--speculative-draft-model-quantization": settings.speculative_draft_model_quantization
        not in (None, "unquant"),
        "a target with recurrent state": hybrid_target,
    }
    names = [name for name, wanted in asked.items() if wanted]
    if names:
        return f"sglang-dflash does not serve {', '.join(names)}"
    folder = draft_folder(
        settings.speculative_draft_model_path, settings.speculative_draft_model_revision
    )
    return unsupported_reason(read_config(folder), folder)


def check_start(settings: Any) -> None:
    """Refuse what can be known to be wrong before anything is loaded.

    Args:
        settings: SGLang's resolved server arguments, read by name.

    Raises:
        ValueError: the draft's path is missing or the block size is impossible.
        UnsupportedCheckpoint: the path holds no draft that fits its own config.
    """
    path = settings.speculative_draft_model_path
    config = check_checkpoint(path, settings.speculative_draft_model_revision)
    block_size = settings.speculative_num_draft_tokens
    if block_size is None and config.block_size is None:
        raise UnsupportedCheckpoint(
            f"{_DRAFT_PATH} {path}: its config.json states no block_size; give the size it was "
            "trained at with --speculative-num-draft-tokens (the anchor included)"
        )
    check_block_size(block_size or config.block_size, config)
