# SPDX-License-Identifier: Apache-2.0
"""SGLang on a machine without an accelerator, from the released wheels alone."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_dflash.cpu.host_memory import free_memory, total_memory
from sglang_dflash.cpu.settings import (
    BACKEND_NAME,
    default_server_args,
    is_batch_invariant,
    number_of_processes,
    thread_environment,
)

__all__ = ["CpuPlatform", "cpu_hooks"]


class CpuPlatform(SRTPlatform):
    """Plain and DFLASH serving on the CPU: torch operators, SDPA attention, gloo between ranks."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        """Make our back end a valid choice of the command line."""
        from sglang.srt.arg_groups import choices

        for known, add in (
            (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
            (choices.DRAFT_ATTENTION_BACKEND_CHOICES, choices.add_draft_attention_backend_choices),
            (
                choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
                choices.add_deterministic_attention_backend_choices,
            ),
            (
                choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
                choices.add_radix_supported_deterministic_attention_backend_choices,
            ),
        ):
            if BACKEND_NAME not in known:
                add([BACKEND_NAME])

    # ---- device ----

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Return the bytes of memory that this host, or this container, has."""
        return total_memory()

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Return the bytes of memory in use on the host, or in this container."""
        return float(total_memory() - free_memory())

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """Return (free, total) bytes."""
        return free_memory(), total_memory()

    def get_device(self, device_id: int | None = 0) -> str:
        """Return "cpu": all ranks share it."""
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one device."""

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the device's name."""
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        """Return an identifier of the device."""
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        """Return None: a CPU has no compute capability."""

    def get_torch_profiler_activity_str(self) -> str:
        """Return the profiler activity's name."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return the profiler activity."""
        return torch.profiler.ProfilerActivity.CPU

    # ---- configuration ----

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set what serving on a CPU needs; refuse choices that cannot work there."""
        default_server_args(server_args)
        os.environ.update(thread_environment(server_args, os.environ))

    def get_default_attention_backend(self) -> str:
        """Return the name of our attention back end."""
        return BACKEND_NAME

    def init_backend(self) -> None:
        """Register the attention back end and the operators (in each process with a model)."""
        from sglang.kernels.fused_op import BaseFusedOp
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_dflash.cpu.attention import create_backend
        from sglang_dflash.cpu.operators import OPERATORS

        # SGLang compiles parts of its sampler, which would ask for a C++ compiler here.
        torch.compiler.set_stance("force_eager")
        register_attention_backend(BACKEND_NAME)(create_backend)
        for operator, forward in OPERATORS:
            BaseFusedOp.register_oot_forward(operator, forward, self.get_dispatch_key_name())

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Pack the weights of a model that was just loaded, and shorten its path."""
        from sglang.srt.runtime_context import get_server_args

        from sglang_dflash.cpu.decoder import straighten
        from sglang_dflash.cpu.linear import pack_linear_layers

        processes = number_of_processes(get_server_args())
        pack_linear_layers(model, batch_invariant=is_batch_invariant(), processes=processes)
        straighten(model)

    def get_dispatch_key_name(self) -> str:
        """Return the key our operators are registered under; others run in their native form."""
        return "dflash_cpu"

    # ---- memory ----

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Return the K/V pool class without Triton kernels."""
        if kind != "mha":
            return None
        from sglang_dflash.cpu.memory import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    # ---- speculative decoding ----

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether `algorithm` runs on this platform: DFLASH only."""
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Return whether the draft can use attention back end `backend`."""
        return algorithm == "DFLASH" and backend == BACKEND_NAME

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """Return the draft's attention back end."""
        return BACKEND_NAME

    def get_speculative_cache_locs_fn(self) -> Any:
        """Return the function that reads reserved slots from the page table."""
        from sglang_dflash.cpu.memory import extend_cache_locs

        return extend_cache_locs

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Return our worker's class."""
        from sglang_dflash.plugin import worker_class

        return worker_class(algorithm)


def cpu_hooks() -> list[tuple[str, Any, str]]:
    """Return the hooks `plugin.register` installs where this platform is active.

    Each is (dotted target, hook, kind), kind being a `HookType` name: "replace", "after" or
    "around", with the call forms of SGLang's HookRegistry.
    """
    from sglang_dflash.cpu import hooks

    return hooks.HOOKS
