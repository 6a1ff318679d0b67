# SPDX-License-Identifier: Apache-2.0
"""The SGLang names that this package relies on, and whether the installed SGLang has them."""

from __future__ import annotations

import inspect
import pkgutil
from typing import NamedTuple

__all__ = ["GRAPH_SEAMS", "SEAMS", "TESTED_SGLANG", "Seam", "check"]

TESTED_SGLANG = "0.5.23"


class Seam(NamedTuple):
    """A name of SGLang's and the parameters we pass or receive.

    Attributes:
        path: dotted path, `package.module.attribute`.
        parameters: names it must accept; every other parameter must have a default. None: the name
            alone matters.
    """

    path: str
    parameters: tuple[str, ...] | None = None


_SRT = "sglang.srt."
_SPEC = _SRT + "speculative."
_POOL = _SRT + "mem_cache."
_RUN = _SRT + "model_executor."

_UPDATER = _RUN + "model_runner_components.weight_updater.WeightUpdater."
# Ways to change weights: those that process nothing after loading, and all.
IN_PLACE_UPDATES = (
    _UPDATER + "update_weights_from_tensor",
    _UPDATER + "load_weights_from_distributed",
    _UPDATER + "update_weights_from_ipc",
)
WEIGHT_UPDATES = (
    _UPDATER + "update_weights_from_disk",
    *IN_PLACE_UPDATES,
    _UPDATER + "end_weight_update",  # weights may have been written from outside
)

SEAMS: tuple[Seam, ...] = (
    # hooks (plugin.py)
    Seam(_SRT + "plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Seam(_SRT + "plugins.hook_registry.HookRegistry._patched"),
    Seam(_SRT + "plugins.hook_registry.HookRegistry._hooks"),
    Seam(_SRT + "arg_groups.resolution_hooks.register_resolution_hook", ("name",)),
    Seam(_SRT + "arg_groups.speculative_hook.handle_speculative_decoding", ("server_args",)),
    Seam(_SRT + "arg_groups.model_override_base.resolving_view", ("server_args",)),
    Seam(_SRT + "arg_groups.overrides.declare_resolution", ("server_args", "source")),
    Seam(_SRT + "environ.envs.SGLANG_SIMULATE_ACC_LEN"),
    Seam(_SRT + "environ.envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
    Seam(
        _SRT + "utils.common.get_available_gpu_memory",
        ("device", "gpu_id", "distributed", "cpu_group"),
    ),
    Seam(_SRT + "configs.hybrid_arch.mambaish_config", ("model_config",)),
    Seam(_SPEC + "spec_info.SpeculativeAlgorithm.create_worker", ("self", "server_args")),
    Seam(_SPEC + "dflash_utils.validate_dflash_request", ("req", "enable_overlap")),
    Seam(
        _SRT + "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        ("self", "meta_info", "recv_obj", "i"),
    ),
    Seam(_POOL + "allocation_sizing.get_req_to_token_extra_context_len", ()),
    Seam(
        _SRT + "managers.scheduler_components.weight_updater"
        ".SchedulerWeightUpdaterManager.begin_weight_update",
        ("self", "recv_req"),
    ),
    Seam(_SRT + "managers.io_struct.BeginWeightUpdateReqOutput"),
    Seam(_SRT + "managers.schedule_batch.Req.update_finish_state", ("self", "new_accepted_len")),
    Seam(_SRT + "managers.schedule_batch.Req.set_finish_with_abort", ("self", "error_msg")),
    Seam(
        _SRT + "session.session_controller.Session.create_req",
        ("self", "req", "tokenizer", "vocab_size"),
    ),
    Seam(
        _SRT + "session.streaming_session.StreamingSession.try_cache_finished_req", ("self", "req")
    ),
    Seam(_SRT + "session.streaming_session.StreamingSession.borrowed_slot", ("self", "req")),
    Seam(
        _POOL + "allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory",
        (
            "self",
            "input_tokens",
            "max_new_tokens",
            "token_capacity",
            "sliding_window_size",
            "chunk_size",
        ),
    ),
    *map(Seam, WEIGHT_UPDATES),
    # sampling (corrections.py, verify/)
    Seam(
        _SRT + "layers.sampler.Sampler._sample_from_probs",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    Seam(
        _SRT + "layers.sampler.Sampler.forward",
        (
            "self",
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
    ),
    Seam(
        _SRT + "layers.sampler.apply_custom_logit_processor",
        ("logits", "sampling_batch_info", "num_tokens_in_batch"),
    ),
    Seam(
        _SRT + "layers.logprob_processor.compute_spec_logprobs",
        ("batch", "logits_output", "predict", "accept_index"),
    ),
    Seam(
        _SRT + "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply",
        ("self", "logits", "repeat"),
    ),
    Seam(
        _SRT + "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator"
        ".accumulate_additive_penalties",
        ("self", "logits"),
    ),
    Seam(
        _SRT + "sampling.sampling_batch_info.SamplingBatchInfo",
        (
            "temperatures",
            "top_ps",
            "top_ks",
            "min_ps",
            "is_all_greedy",
            "is_any_greedy",
            "need_top_p_sampling",
            "need_top_k_sampling",
            "need_min_p_sampling",
            "vocab_size",
            "max_top_k",
            "sampling_seed",
            "grammars",
            "grammar_mask",
            "acc_additive_penalties",
            "acc_scaling_penalties",
            "logit_bias",
            "has_custom_logit_processor",
            "custom_logit_processor",
            "custom_params",
        ),
    ),
    Seam(_SRT + "sampling.sampling_batch_info.ProcessorEntry", ("processor", "rows", "indices")),
    Seam(_SRT + "sampling.sampling_params.TOP_K_ALL"),
    Seam(_SPEC + "spec_utils.GrammarTree.from_linear_chain", ("verify_ids_2d",)),
    Seam(_SPEC + "spec_utils.GrammarTree.resolve", ("self",)),
    Seam(
        _SPEC + "spec_utils.build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Seam(_SRT + "utils.async_probe.sanitize_nan_logits", ("logits", "msg")),
    Seam(_SRT + "utils.common.async_d2h", ("tensor",)),
    # worker.py, state.py
    Seam(_SPEC + "base_spec_worker.BaseSpecWorker.__init__", ("self",)),
    Seam(
        _SPEC + "base_spec_worker.BaseSpecWorker.alloc_memory_pool",
        ("self", "memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    Seam(_SPEC + "spec_info.SpecInput.__init__", ("self", "spec_input_type")),
    Seam(_SPEC + "spec_info.SpecInputType.DFLASH_DRAFT"),
    Seam(
        _POOL + "allocation.alloc_for_spec_decode",
        (
            "tree_cache",
            "req_to_token_pool",
            "reqs",
            "req_pool_indices",
            "cur_kv_lens",
            "cur_kv_lens_cpu",
            "nxt_kv_lens",
            "nxt_kv_lens_cpu",
            "num_needed_tokens",
            "batch",
        ),
    ),
    Seam(_POOL + "allocation_sizing.get_alloc_len_per_decode", ()),
    Seam(_POOL + "allocation_sizing.get_alloc_reserve_per_decode", ()),
    Seam(_SRT + "managers.schedule_batch.ScheduleBatch.maybe_evict_swa", ("self",)),
    Seam(
        _SRT + "managers.utils.GenerationBatchResult",
        (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "cap_lens",
            "new_seq_lens",
            "next_draft_input",
            "speculative_num_draft_tokens",
            "can_run_cuda_graph",
        ),
    ),
    Seam(
        _POOL + "kv_index_translator.KVIndexTranslator.plan",
        ("self", "req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
    ),
    Seam(_POOL + "kv_loc_plan.KVLocPlan.write_ids", ("self", "reader", "cols")),
    Seam(_POOL + "kv_loc_plan.KVLocPlan.bind", ("self", "batch", "reader", "cols")),
    Seam(_SPEC + "spec_tp_sync.SpecTpSync.sync", ("self", "site", "values")),
    Seam(_SPEC + "spec_tp_sync.SpecTpSyncSite.DFLASH_TARGET"),
    Seam(_SPEC + "spec_tp_sync.SpecTpSyncSite.DFLASH_ACCEPT_GREEDY"),
    Seam(_SPEC + "spec_tp_sync.SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE"),
    Seam(_SPEC + "spec_tp_sync.SpecTpSyncSite.DFLASH_SELECTOR"),
    Seam(_SRT + "layers.dp_attention.get_dp_tp_group", ()),
    Seam(_SRT + "utils.common.async_h2d", ("args", "dtype", "device")),
    Seam(_SRT + "runtime_context.get_spec", ()),
    Seam(_SRT + "runtime_context.get_exec", ()),
    Seam(_SRT + "runtime_context.get_observability", ()),
    Seam(_SRT + "runtime_context.get_parallel", ()),
    Seam(_RUN + "cuda_graph_config.Backend.DISABLED"),
    # draft, verify
    Seam(
        _SPEC + "draft_worker_common.build_draft_tp_worker",
        (
            "server_args",
            "gpu_id",
            "nccl_port",
            "target_model_config",
            "algo_label",
            "draft_worker_cls",
        ),
    ),
    Seam(_SRT + "managers.tp_worker.TpModelWorker._init_model_config", ("self",)),
    Seam(
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        (
            "self",
            "batch",
            "forward_batch",
            "is_verify",
            "skip_attn_backend_init",
            "capture_hidden_mode",
            "return_kv_loc_plan",
        ),
    ),
    Seam(_SRT + "models.registry.ModelRegistry.models"),
    Seam(_SRT + "models.utils.apply_qk_norm", ("q", "k", "q_norm", "k_norm", "head_dim")),
    Seam(
        _SPEC + "dflash_info.DFlashVerifyInput",
        (
            "draft_token",
            "positions",
            "draft_token_num",
            "capture_hidden_mode",
            "kv_loc_plan",
            "kv_loc_cols",
            "ragged_verify_layout",
        ),
    ),
    Seam(_SPEC + "spec_info.SpeculativeAlgorithm.supports_ragged_verify", ("self",)),
    Seam(_SPEC + "ragged_verify.RaggedVerifyMode.COMPACT"),
    Seam(_SRT + "layers.attention.base_attn_backend.AttentionBackend.supports_ragged_verify_graph"),
    Seam(_SRT + "distributed.parallel_state.GroupCoordinator.broadcast", ("self", "input_", "src")),
    Seam(
        _SPEC + "ragged_verify.RaggedVerifyLayout",
        (
            "verify_lens",
            "graph_num_tokens",
            "extend_start_loc",
            "qo_indptr_device",
            "verify_lens_cpu",
            "total_verify_tokens",
            "max_q_len",
        ),
    ),
    Seam(
        _SPEC + "dflash_info.DFlashVerifyInput.prepare_for_verify",
        ("self", "batch", "target_worker"),
    ),
    Seam(
        _RUN + "forward_batch_info.ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
            "seq_lens_cpu",
            "positions",
            "spec_algorithm",
            "spec_info",
            "capture_hidden_mode",
            "global_num_token_non_padded_cpu",
            "can_run_decode_cuda_graph",
        ),
    ),
    Seam(_POOL + "memory_pool.KVWriteLoc", ("loc", "physical")),
    Seam(
        _POOL + "memory_pool.MHATokenToKVPool.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
    ),
    Seam(
        _SRT + "layers.radix_attention.RadixAttention.__init__",
        (
            "self",
            "num_heads",
            "head_dim",
            "scaling",
            "num_kv_heads",
            "layer_id",
            "sliding_window_size",
            "attn_type",
        ),
    ),
    Seam(
        _SRT + "layers.rotary_embedding.get_rope",
        ("head_size", "rotary_dim", "max_position", "base", "rope_scaling", "is_neox_style"),
    ),
)

# Of verify graphs by rows, asked for on a GPU alone: their module loads its kernels.
GRAPH_SEAMS: tuple[Seam, ...] = (
    Seam(
        _RUN + "runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._ragged_capture_slots",
        ("self", "num_tokens"),
    ),
    Seam(_RUN + "runner.decode_cuda_graph_runner.ragged_verify_compact_graphs_enabled"),
)


def check(seams: tuple[Seam, ...] | None = None) -> list[str]:
    """Return what the installed SGLang lacks of `seams` (all by default), one line each."""
    problems = (_problem(seam) for seam in (SEAMS if seams is None else seams))
    return [problem for problem in problems if problem is not None]


def _problem(seam: Seam) -> str | None:
    try:
        found = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path}: not there ({error})"
    if seam.parameters is None:
        return None
    parameters = inspect.signature(found).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    missing = [name for name in seam.parameters if name not in parameters]
    new = [
        name
        for name, p in parameters.items()
        if name not in seam.parameters and p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    if not missing and not new:
        return None
    parts = [
        f"{word} {', '.join(names)}"
        for word, names in (("lacks", missing), ("wants", new))
        if names
    ]
    return f"{seam.path}: {' and '.join(parts)}"
