# SPDX-License-Identifier: Apache-2.0
"""What the CPU platform decides for a server: arguments, and the threads of its processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

__all__ = [
    "BACKEND_NAME",
    "default_server_args",
    "is_batch_invariant",
    "rank_cpus",
    "thread_environment",
]

BACKEND_NAME = "dflash_sdpa"
CHUNKED_PREFILL_TOKENS = 1024
MAX_RUNNING_REQUESTS = 256  # SGLang's thousands cost a page table each and only queue here
KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")

# How long an idle OpenMP thread spins before it sleeps, in loops of some 10 ns. On a core of its
# own a sleeping thread costs about 15 us to wake; on a core it has to share, a spinning one costs
# the scheduler's time slice at each operator (2x of all throughput, measured against 10000).
_SPIN_COUNT = "1000"

# option -> values that work on a CPU, for options whose other values would fail far from here
_ATTENTION_OPTIONS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)


def default_server_args(server_args: Any) -> None:
    """Set the fields a CPU needs on SGLang's resolving `server_args`; the user's choice wins.

    Raises:
        ValueError: a choice of the user that cannot work on a CPU.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    raw = server_args._raw_input
    _refuse_impossible(raw)
    server_args.attention_backend = BACKEND_NAME
    server_args.sampling_backend = "pytorch"
    graphs = server_args.cuda_graph_config
    for phase in Phase.ALL:
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    server_args.cuda_graph_config = graphs
    server_args.disable_custom_all_reduce = True
    # An idle scheduler would poll at full speed, on a core that another process computes with.
    server_args.sleep_on_idle = True
    if raw.get("max_running_requests") is None and raw.get("speculative_algorithm") is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    if raw.get("chunked_prefill_size") is None:
        server_args.chunked_prefill_size = CHUNKED_PREFILL_TOKENS


def is_batch_invariant() -> bool:
    """Return whether a row's result must be the same bits whatever else is in its forward.

    `--enable-deterministic-inference` asks for it; read where a model or a back end is made.
    """
    from sglang.srt.runtime_context import get_exec

    return get_exec().deterministic.enable_deterministic_inference


def _refuse_impossible(raw: Mapping[str, Any]) -> None:
    """Raise where the user asked for something only an accelerator has."""
    for option in _ATTENTION_OPTIONS:
        _require(raw, option, (None, BACKEND_NAME), "leave the option out")
    _require(raw, "sampling_backend", (None, "pytorch"), "leave the option out")
    _require(raw, "kv_cache_dtype", KV_DTYPES, "leave the option out (auto)")
    _require(raw, "device", (None, "cpu"), "leave the option out")
    _require(raw, "enable_torch_compile", (False, None), "leave the option out")


def _require(raw: Mapping[str, Any], option: str, allowed: tuple, way_out: str) -> None:
    """Raise ValueError naming the option, what came, what is allowed and the way out."""
    found = raw.get(option)
    if found not in allowed:
        flag = "--" + option.replace("_", "-")
        names = ", ".join(str(a) for a in allowed if a is not None)
        raise ValueError(
            f"{flag} {found}: this machine has no accelerator, so SGLang runs on the CPU platform "
            f"of sglang-dflash, which accepts {names}; {way_out}."
        )


def thread_environment(server_args: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set before the worker processes start.

    OpenMP reads its settings when torch is loaded, so they must be in the environment that the
    workers inherit. What the user has set stays.
    """
    wanted = {"GOMP_SPINCOUNT": _SPIN_COUNT, "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0"}
    ranks = number_of_processes(server_args)
    if ranks > 1:
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(str(c) for c in cpus) for cpus in rank_cpus(ranks)
        )
    return {name: value for name, value in wanted.items() if name not in environ}


def number_of_processes(server_args: Any) -> int:
    """Return how many processes with a model share this host."""
    return server_args.tp_size * server_args.pp_size * server_args.dp_size


def rank_cpus(ranks: int) -> list[list[int]]:
    """Return the cores of each rank: a fair share of those this process may use.

    With fewer cores than ranks, ranks share cores.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < ranks:
        return [[cpus[rank % len(cpus)]] for rank in range(ranks)]
    bounds = [len(cpus) * rank // ranks for rank in range(ranks + 1)]
    return [cpus[a:b] for a, b in itertools.pairwise(bounds)]
