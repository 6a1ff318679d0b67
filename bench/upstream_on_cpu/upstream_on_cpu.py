# SPDX-License-Identifier: Apache-2.0
"""What SGLang's own DFLASH worker needs to run on our CPU platform: for comparison only.

Put this folder on PYTHONPATH and set SGLANG_DFLASH_WORKER=upstream.
"""

from __future__ import annotations

__all__ = ["enable"]


def enable() -> None:
    """Let the platform start SGLang's worker, and give it what has no CPU form."""
    import torch
    from sglang.srt.models import dflash

    from sglang_dflash.cpu.platform import CpuPlatform

    CpuPlatform.serves_upstream_worker = True
    on_device = torch.Tensor.record_stream

    def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
        if tensor.device.type != "cpu":
            on_device(tensor, stream)

    torch.Tensor.record_stream = record_stream
    build = dflash.DFlashAttention.__init__

    def build_without_triton(self: dflash.DFlashAttention, *args: object, **kwargs: object) -> None:
        build(self, *args, **kwargs)
        self.use_table_qk_norm_rope = False

    dflash.DFlashAttention.__init__ = build_without_triton
