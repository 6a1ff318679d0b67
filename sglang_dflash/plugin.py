# SPDX-License-Identifier: Apache-2.0
"""The two entry points, and every hook: the one file that changes SGLang.

SGLang logs and swallows what a plugin raises while it loads. So nothing is decided there: the hooks
check themselves when a server that asks for DFLASH starts, where an exception stops it.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from sglang_dflash.seams import TESTED_SGLANG

__all__ = ["cpu_platform", "register", "worker_class"]

logger = logging.getLogger(__name__)

_ALGORITHM = "DFLASH"
_PLUGIN_NAME = "dflash"
_CPU_PLATFORM = "sglang_dflash.cpu.platform:CpuPlatform"
_CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
_ADMISSION = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
_SEEDED_DRAW = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
_PENALTIES = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"
_META_INFO = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"
)
_RAGGED = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.supports_ragged_verify"
_MODE = "SGLANG_RAGGED_VERIFY_MODE"
_ROW_WIDTH = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
_BEGIN_UPDATE = (
    "sglang.srt.managers.scheduler_components.weight_updater"
    ".SchedulerWeightUpdaterManager.begin_weight_update"
)
_FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
_REFUSE = "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort"
_NEXT_TURN = "sglang.srt.session.session_controller.Session.create_req"
_STREAMING_TURN = "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req"
_MOST_NEW_TOKENS = (
    "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory"
)
_UPSTREAM_WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"


class _Process:
    """What this process has decided."""

    set_mode = False  # SGLang's mode of verify graphs, in the environment
    ragged_graphs = False  # its worker plans on the device


def cpu_platform() -> str | None:
    """Return the CPU platform's dotted class path where torch sees no accelerator, else None.

    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU build, so ours steps aside.
    """
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or torch.accelerator.is_available():
        return None
    return _CPU_PLATFORM


def register() -> None:
    """Install the hooks; SGLang calls this in each of its processes."""
    try:
        _register_hooks()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        # SGLang would go on without us, and serve DFLASH with a worker nobody asked for.
        raise SystemExit(
            f"sglang-dflash cannot attach itself to this SGLang ({error}). Install the one it was "
            f"made for (pip install sglang=={TESTED_SGLANG}), or pip uninstall sglang-dflash."
        ) from error


def worker_class(algorithm: str) -> None:
    """Return None: `create_worker` was hooked and has decided already.

    Raises:
        SeamMoved: it was not, though this platform offers DFLASH.
    """
    if algorithm == _ALGORITHM:
        _check_hooks()


def _register_hooks() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash.seams import WEIGHT_UPDATES

    register_resolution_hook("handle_speculative_decoding")(_resolve_arguments)
    for target, hook in _around():
        HookRegistry.register(target, hook, HookType.AROUND)
    for update in WEIGHT_UPDATES:
        HookRegistry.register(update, _note_update, HookType.AFTER)
    for target, hook, kind in _cpu_hooks():
        HookRegistry.register(target, hook, HookType(kind))


def _around() -> list[tuple[str, Callable[..., Any]]]:
    """Return what is wrapped on every platform: (target, hook)."""
    return [
        (_CREATE_WORKER, _create_worker),
        (_ADMISSION, _admit),
        (_RAGGED, _verifies_ragged),
        (_ROW_WIDTH, _widen_rows),
        (_META_INFO, _tell_acceptance),
        (_SEEDED_DRAW, _draw_by_request),
        (_PENALTIES, _penalise_in_order),
        (_BEGIN_UPDATE, _begin_update),
        (_FINISH, _end_token_by_token),
        (_REFUSE, _disarm),
        (_NEXT_TURN, _begin_turn),
        (_STREAMING_TURN, _keep_turn),
        (_MOST_NEW_TOKENS, _leave_room),
    ]


def _note_update(result: Any, *_: Any, **__: Any) -> Any:
    """Tell who keeps a copy of the head that its weights may have changed."""
    from sglang_dflash.draft.hot_head import note_weight_update

    note_weight_update()
    return result


def _cpu_hooks() -> list[tuple[str, Any, str]]:
    """Return the CPU platform's hooks where it is active: (target, hook, kind)."""
    from sglang.srt.platforms import current_platform

    if type(current_platform).__module__ != _CPU_PLATFORM.partition(":")[0]:
        return []
    from sglang_dflash.cpu.platform import cpu_hooks

    return cpu_hooks()


def _resolve_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check a DFLASH start before SGLang resolves its flags."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    _forget_graphs()
    settings = resolving_view(server_args)
    if (settings.speculative_algorithm or "").upper() != _ALGORITHM:
        previous(server_args)
        return
    _check_hooks()
    if settings.speculative_draft_model_path is None:
        raise ValueError(
            "--speculative-algorithm DFLASH needs --speculative-draft-model-path, and got none: "
            "give the folder or Hub id of a DFlash draft made for the target"
        )
    target, options = _target(server_args), _options(settings)
    if _choose_upstream(server_args, options, target) is None:
        from sglang_dflash.defaults import declare_defaults, warn_of_other_kernels
        from sglang_dflash.routing import check_start

        _refuse_simulation()
        check_start(settings, options, target)
        declare_defaults(server_args, settings)
        _ask_for_ragged_graphs(options, target)
        warn_of_other_kernels(settings)
    previous(server_args)


def _refuse_simulation() -> None:
    """Keep a benchmark from comparing a forced acceptance length with one that is real."""
    from sglang.srt.environ import envs

    length = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if length > 0:
        raise ValueError(
            f"SGLANG_SIMULATE_ACC_LEN={length}: sglang-dflash commits what verification accepts, "
            "and simulates nothing. Unset it, or set SGLANG_DFLASH_WORKER=upstream."
        )


def _forget_graphs() -> None:
    """Take back what an engine before, in this process, asked SGLang for."""
    if _Process.set_mode:
        os.environ.pop(_MODE, None)
    _Process.set_mode = _Process.ragged_graphs = False


def _ask_for_ragged_graphs(options: Any, target: Any) -> None:
    """Have SGLang capture its verify graphs by rows, where a step on a GPU chooses their number.

    Raises:
        ValueError: the user asks for another mode of these graphs.
    """
    from sglang_dflash.routing import BUDGET
    from sglang_dflash.seams import GRAPH_SEAMS, check

    if not _plans_on_device(options, target):
        return
    _refuse_moved(check(GRAPH_SEAMS))
    mode = os.environ.get(_MODE)
    if mode not in (None, "compact"):
        raise ValueError(f"{BUDGET} is 'measured' and needs {_MODE}=compact, not {mode}: unset one")
    _Process.set_mode = mode is None
    # In the environment, for the scheduler's processes are yet to start.
    os.environ[_MODE] = "compact"


def _plans_on_device(options: Any, target: Any) -> bool:
    """Return whether the budget is asked for where the host does not wait for the device.

    Raises:
        ValueError: it is, and there is no CUDA device.
    """
    import torch
    from sglang.srt.platforms import current_platform

    from sglang_dflash.routing import BUDGET

    if current_platform.is_out_of_tree() or options.budget != "measured" or target.has_mrope:
        return False
    if not torch.cuda.is_available():
        raise ValueError(
            f"{BUDGET} is 'measured': it knows CPUs and CUDA's verify graphs, and this is "
            f"{current_platform.device_name}. Choose 'auto', which verifies whole blocks."
        )
    return True


def _verifies_ragged(original: Callable[[Any], bool], algorithm: Any) -> bool:
    """Let SGLang capture them for our worker; its graph runner asks this, and the mode."""
    return original(algorithm) or (algorithm.is_dflash() and _Process.ragged_graphs)


def _create_worker(original: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """Give the scheduler our worker where DFLASH is asked for and ours can serve it."""
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    _check_hooks()
    from sglang.srt.arg_groups.model_override_base import resolving_view

    options, target = _options(resolving_view(server_args)), _target(server_args)
    reason = _choose_upstream(server_args, options, target)
    if reason is None:
        from sglang_dflash.routing import check_back_end
        from sglang_dflash.worker import DFlashWorker

        _Process.ragged_graphs = _plans_on_device(options, target)
        if _Process.ragged_graphs:
            check_back_end(resolving_view(server_args), _gpu_generation())
        return DFlashWorker
    logger.info("DFLASH is served by SGLang's own worker: %s", reason)
    return original(algorithm, server_args)


def _choose_upstream(server_args: Any, options: Any, target: Any) -> str | None:
    """Return why SGLang's worker serves, or None; refuse where it could not.

    Raises:
        UnsupportedCheckpoint: our worker cannot serve this, and SGLang's needs CUDA.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.platforms import current_platform

    from sglang_dflash.errors import UnsupportedCheckpoint
    from sglang_dflash.routing import upstream_reason

    settings = resolving_view(server_args)
    reason = upstream_reason(settings, options, target)
    if reason is None or not current_platform.is_out_of_tree():
        return reason
    if getattr(current_platform, "serves_upstream_worker", False):
        return reason
    raise UnsupportedCheckpoint(
        f"DFLASH on {current_platform.device_name}: {reason}. SGLang's own DFLASH worker may serve "
        "this, but needs CUDA; without it, serve without these or with a DFlash or DFlash2 draft."
    )


def _options(settings: Any) -> Any:
    """Return what is asked of the plugin, as `sglang_dflash.options.Options`."""
    from sglang_dflash.options import Options

    return Options.read(os.environ, settings.speculative_adaptive_config)


def _target(server_args: Any) -> Any:
    """Return what a draft must fit, as `sglang_dflash.routing.Target`."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.environ import envs

    from sglang_dflash.routing import Target

    config = ModelConfig.from_server_args(server_args)
    return Target(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        context_length=server_args.context_length or config.context_len,
        has_recurrent_state=mambaish_config(config) is not None,
        has_mrope=config.model_is_mrope,
        outgrows_draft=envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get(),
    )


def _admit(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """Refuse, when it arrives, a request that our worker could not answer exactly."""
    if _serves_here():
        from sglang.srt.runtime_context import get_exec

        from sglang_dflash.admission import refusal

        deterministic = get_exec().deterministic.enable_deterministic_inference
        return refusal(req, deterministic=deterministic)
    return original(req, enable_overlap)


def _begin_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Refuse an update of the draft alone, which would reach nobody."""
    if _serves_here() and request.selector == "draft":
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

        from sglang_dflash.admission import NO_DRAFT_UPDATE

        return BeginWeightUpdateReqOutput(success=False, message=NO_DRAFT_UPDATE)
    return original(manager, request)


def _disarm(original: Callable[..., None], req: Any, *args: Any, **options: Any) -> None:
    """Take from a refused request what our worker cannot do: SGLang yet runs it for a token.

    Whoever refused it: SGLang may do so before it asks us.
    """
    original(req, *args, **options)
    if _serves_here():
        req.sampling_params = copy.copy(req.sampling_params)
        req.sampling_params.min_p = 0.0
        req.return_hidden_states = req.return_sampling_mask = False


def _end_token_by_token(original: Callable[..., None], *args: Any, **options: Any) -> None:
    """End a request where plain decoding would, whatever was committed behind that token."""
    if not _serves_here():
        return original(*args, **options)
    from sglang_dflash.finish import end_token_by_token

    return end_token_by_token(original, *args, **options)


def _begin_turn(original: Callable[..., Any], session: Any, *args: Any, **options: Any) -> Any:
    """Give a session's next turn what the client saw of those before."""
    if _serves_here():
        from sglang_dflash.finish import drop_what_follows_the_end

        drop_what_follows_the_end(session)
    return original(session, *args, **options)


def _keep_turn(original: Callable[..., bool], *args: Any, **options: Any) -> bool:
    """Keep of a streaming session's turn the K/V that was computed."""
    if not _serves_here():
        return original(*args, **options)
    from sglang_dflash.finish import keep_computed_length

    return keep_computed_length(original, *args, **options)


def _leave_room(
    original: Callable[..., int | None],
    allocator: Any,
    input_tokens: int,
    max_new_tokens: int,
    *,
    token_capacity: int,
    **options: Any,
) -> int | None:
    """Let a request be as long as the K/V pool holds beside the reserve of its decode steps.

    SGLang knows no reserve here, and would stop a request that is alone in the pool before its end.
    """
    asked = (allocator, input_tokens, max_new_tokens)
    if not _serves_here() or max_new_tokens <= 1:  # one token needs no decode step
        return original(*asked, token_capacity=token_capacity, **options)
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    room = token_capacity - get_alloc_reserve_per_decode()
    return original(*asked, token_capacity=room, **options) or None


def _draw_by_request(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make a seeded request's text independent of its batch mates, with and without DFLASH."""
    from sglang_dflash.corrections import draw_by_request

    return draw_by_request(original, *args, **options)


def _penalise_in_order(original: Callable[..., None], *args: Any, **options: Any) -> None:
    """Make the order of penalties the same in every process, with and without DFLASH."""
    from sglang_dflash.corrections import penalise_in_order

    penalise_in_order(original, *args, **options)


def _tell_acceptance(
    original: Callable[..., None], manager: Any, meta_info: dict[str, Any], *args: Any
) -> None:
    """Add what verify made of each place in the block to a request's `meta_info`."""
    from sglang.srt.runtime_context import get_spec

    original(manager, meta_info, *args)
    rows = meta_info.get("spec_cap_lens_histogram")
    if rows and get_spec().speculative_algorithm == _ALGORITHM:
        from sglang_dflash.acceptance import by_position

        meta_info.update(by_position(rows, meta_info.get("spec_correct_drafts_histogram", [])))


def _widen_rows(original: Callable[[], int]) -> int:
    """Give a row of the page table room for the whole speculative reserve.

    A request at the context limit still reserves two blocks; SGLang counts them at page sizes above
    1 only, and at page size 1 would write into the next request's row.
    """
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_page_size,
        get_alloc_reserve_per_decode,
    )
    from sglang.srt.runtime_context import get_spec

    extra = original()
    if get_spec().speculative_algorithm != _ALGORITHM:
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def _serves_here() -> bool:
    # Imported only where `_create_worker` chose it, in the process that serves.
    return "sglang_dflash.worker" in sys.modules


def _check_hooks() -> None:
    """Refuse to start half-hooked, on a moved seam, or beside a plugin with the same aim.

    Raises:
        SeamMoved: SGLang's names differ from those we rely on, or a hook is not in place.
        PluginConflict: another plugin replaces the DFLASH worker.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_dflash.errors import PluginConflict
    from sglang_dflash.seams import check

    targets = [target for target, _ in _around()]
    targets += [hook[0] for hook in _cpu_hooks()]
    problems = check()
    problems += [
        f"{target}: our hook is not applied"
        for target in targets
        if target not in HookRegistry._patched
    ]
    _refuse_moved(problems)
    foreign = sorted(
        f"{source.plugin_name} ({target})"
        for target in (_CREATE_WORKER, _UPSTREAM_WORKER, _ADMISSION)
        for _, _, source in HookRegistry._hooks.get(target, ())
        if source is not None and source.plugin_name != _PLUGIN_NAME
    )
    if foreign:
        raise PluginConflict(
            f"these plugins also change DFLASH: {', '.join(foreign)}. Name the one to use with "
            f"SGLANG_PLUGINS (ours is {_PLUGIN_NAME!r}), or uninstall the other."
        )


def _gpu_generation() -> int:
    """Return the major compute capability: 9 is Hopper, 10 Blackwell."""
    import torch

    return int(torch.cuda.get_device_capability()[0])


def _refuse_moved(problems: list[str]) -> None:
    from sglang_dflash.errors import SeamMoved

    if problems:
        raise SeamMoved(
            f"sglang-dflash was made for SGLang {TESTED_SGLANG} and cannot serve DFLASH on this "
            f"one: {'; '.join(problems)}. Install sglang=={TESTED_SGLANG}, or uninstall "
            "sglang-dflash."
        )
