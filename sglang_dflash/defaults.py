# SPDX-License-Identifier: Apache-2.0
"""SGLang's settings that DFLASH has stand otherwise, or takes with a warning."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["declare_defaults", "warn_of_other_kernels"]

logger = logging.getLogger(__name__)


def declare_defaults(server_args: Any, settings: Any) -> None:
    """Resolve what SGLang would decide for its own DFLASH worker.

    Args:
        server_args: SGLang's, while they are being resolved.
        settings: a view of them with what was resolved so far.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution

    if settings.speculative_adaptive:
        # Else SGLang says that DFLASH adapts to nothing: our budget may, without the flag.
        declare_resolution(server_args, "sglang_dflash", speculative_adaptive=False)
        logger.info(
            "--speculative-adaptive adds nothing: SGLANG_DFLASH_BUDGET decides (auto: on a CPU)"
        )
    if settings.min_free_slots_delay is None:
        # For DFLASH alone SGLang lets requests wait until some slots are free, since its worker's
        # prefill runs the draft, and a full server then never preempts for a priority. Ours adds
        # one projection: requests are admitted as in plain decoding (1 turns the waiting off).
        declare_resolution(server_args, "sglang_dflash", min_free_slots_delay=1)
    if settings.enable_memory_saver:
        # The draft cannot be sent again after its memory was released.
        declare_resolution(server_args, "sglang_dflash", enable_draft_weights_cpu_backup=True)


def warn_of_other_kernels(settings: Any) -> None:
    """Say of a GPU what has been seen on CPUs only.

    Args:
        settings: SGLang's arguments with what was resolved so far.
    """
    from sglang.srt.platforms import current_platform

    if settings.enable_deterministic_inference and not current_platform.is_out_of_tree():
        logger.warning(
            "--enable-deterministic-inference: a verified block goes through another attention "
            "kernel than plain decoding's row. That DFLASH's texts equal plain decoding's token "
            "for token has been tested on CPUs; on this device compare before you rely on it."
        )
