# SPDX-License-Identifier: Apache-2.0
"""The SGLang functions that have no platform seam and no CPU form: our replacements."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.cpu.host_memory import free_memory
from sglang_dflash.cpu.linear import repack_linear_layers
from sglang_dflash.cpu.memory import assign_req_to_token_pool
from sglang_dflash.cpu.operators import softcap_logits
from sglang_dflash.cpu.settings import number_of_processes
from sglang_dflash.noise import murmur_hash32
from sglang_dflash.seams import IN_PLACE_UPDATES

__all__ = ["HOOKS"]

_FREE_MEMORY_SHARE = 0.5


def _use_rank_cpus(result: str | None, **_: Any) -> str | None:
    """Keep this rank's threads on the cores SGLang worked out for it (it binds only with AMX).

    Args:
        result: comma-separated cores, from `_bind_threads_if_cpu`.
    """
    if result is None or "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
        return result
    cpus = {int(c) for c in str(result).split(",")} & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))
    return result


def _last_slots(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """Return [n], the slot of each request's last token, or -1: SGLang would ask Triton for it.

    Args:
        req_to_token: [rows, width] int32, the slot of each position.
        req_pool_indices: [n] int64, rows of `req_to_token`.
        prefix_lens: [n] int32 or int64, tokens that have slots.
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


def _share_of_memory(original: Callable[..., int], self: Any, pre_model_load_memory: float) -> int:
    """Return the bytes this process's K/V pool may take: all processes see the same free memory.

    The server shares the host with other programs, so without a user's --mem-fraction-static the
    pools together take at most half of what is free beside the weights. SGLang's own sum compares
    with what was free before they were loaded, and fails where others have taken memory since.

    Raises:
        ValueError: nothing is free.
    """
    from sglang.srt.runtime_context import get_parallel, get_server_args
    from sglang.srt.utils.common import get_available_gpu_memory

    arguments, ranks = get_server_args(), get_parallel().world_group
    if arguments._raw_input.get("mem_fraction_static") is not None:
        return original(self, pre_model_load_memory) // number_of_processes(arguments)
    gc.collect()  # what loading left behind
    free = get_available_gpu_memory(  # GiB, the least that a rank sees
        self.device, self.gpu_id, distributed=ranks.world_size > 1, cpu_group=ranks.cpu_group
    )
    share = free * _FREE_MEMORY_SHARE
    if self.mambaish_config is not None:
        share = self._handle_max_mamba_cache(share)
    if share <= 0:
        raise ValueError(
            f"{free:.2f} GiB of memory are free for the K/V pool. Free memory, raise the "
            "container's limit, or serve a smaller model."
        )
    return int(share * 2**30) // number_of_processes(arguments)


def _repack(result: Any, updater: Any, *_: Any, **__: Any) -> Any:
    """Pack the linear weights again after SGLang has changed them in place."""
    repack_linear_layers(updater.get_model())
    return result


def _keep_operators(runner: Any) -> None:
    """Leave torch's operators as they are: SGLang's batch-invariant ones are Triton kernels.

    Ours were chosen by the same option already, where the model was packed and its attention made
    (`settings.is_batch_invariant`); norms, activations and the sampler go row by row anyway.
    """


HOOKS: list[tuple[str, Any, str]] = [
    (
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_req_to_token_pool,
        "replace",
    ),
    ("sglang.kernels.ops.activation.softcap._softcap_logits", softcap_logits, "replace"),
    ("sglang.srt.mem_cache.allocation.get_last_loc", _last_slots, "replace"),
    ("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32, "replace"),
    (
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        _keep_operators,
        "replace",
    ),
    ("sglang.srt.utils.common.get_free_cpu_memory", free_memory, "replace"),
    ("sglang.srt.distributed.bootstrap._bind_threads_if_cpu", _use_rank_cpus, "after"),
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        _share_of_memory,
        "around",
    ),
    *((update, _repack, "after") for update in IN_PLACE_UPDATES),
]
