# SPDX-License-Identifier: Apache-2.0
"""Who serves DFLASH: our worker, or SGLang's for what ours does not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.draft.checkpoint import check_checkpoint, draft_folder
from sglang_dflash.draft.checks import check_block_size, check_target
from sglang_dflash.draft.config import read_config
from sglang_dflash.draft.schema import Reason, reasons_against
from sglang_dflash.draft.token_map import read_token_map, token_map_of
from sglang_dflash.draft.upstream import lost_there, misread
from sglang_dflash.draft.weights import read_weight_shapes
from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint
from sglang_dflash.options import CONFIG_FLAG, Options

__all__ = ["BUDGET", "Target", "check_back_end", "check_start", "upstream_reason"]

_RAGGED_BACK_ENDS = ("fa3", "fa4", "trtllm_mha")  # whose verify graphs take unequal widths
_BLACKWELL = 10
BUDGET = f"the budget (SGLANG_DFLASH_BUDGET or the file of {CONFIG_FLAG})"
_GRAMMAR_BACKENDS = ("xgrammar", "llguidance", "none")
_SAMPLING_BACKENDS = ("pytorch", "flashinfer", "intel_xpu")


class Target(NamedTuple):
    """What a draft must fit.

    Attributes:
        hidden_size: channels of its hidden states.
        vocab_size: rows of its embedding.
        num_layers: its decoder layers.
        context_length: tokens that it is served with.
        has_recurrent_state: whether it keeps state beside K/V (Mamba, GDN, ...).
        has_mrope: whether positions have several axes, as in models that see pictures.
        outgrows_draft: whether the user lets the context be longer than the draft was made for.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    context_length: int
    has_recurrent_state: bool
    has_mrope: bool = False
    outgrows_draft: bool = False


def upstream_reason(settings: Any, options: Options, target: Target) -> str | None:
    """Return why SGLang's own worker must serve, or None when ours does.

    Args:
        settings: SGLang's resolved server arguments, read by name.
        options: the plugin's own.
        target: what is served.

    Raises:
        UnsupportedCheckpoint: ours is asked for by name and cannot, or neither worker runs the
            draft as it was trained.
    """
    if options.worker == "upstream":
        return "SGLANG_DFLASH_WORKER=upstream"
    config, folder = _draft(settings)
    unread = _unread(settings, config, folder)  # first: it refuses what no worker should serve
    unserved = _unserved(settings, target)
    lost = [] if unserved is None or unread is not None else _lost(settings, config)
    if lost:
        raise UnsupportedCheckpoint(
            f"{DRAFT_OPTION} {settings.speculative_draft_model_path}: {unserved}, and SGLang's own "
            f"DFLASH worker, which does, ignores the draft's {', '.join(lost)}. Serve without the "
            "former, or set SGLANG_DFLASH_WORKER=upstream to have that worker try on CUDA."
        )
    reason = unserved or unread
    if reason is not None and options.worker == "plugin":
        raise UnsupportedCheckpoint(
            f"SGLANG_DFLASH_WORKER=plugin: {reason}. Change that, or set it to 'auto' or "
            "'upstream': SGLang's own worker may serve this on CUDA."
        )
    return reason


def _lost(settings: Any, config: dict[str, Any]) -> list[str]:
    """Return what SGLang's worker would leave out; it misses no tensor, so we look for all."""
    path, revision = (
        settings.speculative_draft_model_path,
        settings.speculative_draft_model_revision,
    )
    check_checkpoint(path, revision)
    folder = draft_folder(path, revision, weights=True)
    return lost_there(config, read_weight_shapes(folder))


def _unserved(settings: Any, target: Target) -> str | None:
    """Return what our worker does not serve, or None."""
    asked = {
        "--speculative-draft-window-size": settings.speculative_draft_window_size is not None,
        "--speculative-use-block-verification": settings.speculative_use_block_verification,
        "--enable-lora or --lora-paths": _asks_for_lora(settings),
        "--enable-strict-thinking": settings.enable_strict_thinking,
        # SGLang has turned --enable-dp-attention into this by now.
        "--attn-dp-size": settings.attn_dp_size > 1,
        "--attn-cp-size": settings.attn_cp_size > 1,
        "--dcp-size": settings.dcp_size > 1,
        "--enable-prefill-cp": settings.enable_prefill_cp,
        "--enable-unified-memory": settings.enable_unified_memory,
        "--disaggregation-mode": settings.disaggregation_mode not in (None, "null"),
        "--speculative-draft-model-quantization": _asks_for_quantised_draft(settings),
        "a target with recurrent state": target.has_recurrent_state,
    }
    names = [name for name, wanted in asked.items() if wanted]
    return f"sglang-dflash does not serve {', '.join(names)}" if names else None


def _draft(settings: Any) -> tuple[dict[str, Any], Path]:
    folder = draft_folder(
        settings.speculative_draft_model_path, settings.speculative_draft_model_revision
    )
    return read_config(folder), folder


def _unread(settings: Any, config: dict[str, Any], folder: Path) -> str | None:
    """Return why the draft is none of ours though SGLang's worker has its model, or None.

    Raises:
        UnsupportedCheckpoint: that worker would serve without a part of the draft.
    """
    path = settings.speculative_draft_model_path
    reasons = reasons_against(config, folder)
    lost = misread(config, reasons, from_hub=folder != Path(path))
    if lost:
        raise UnsupportedCheckpoint(
            f"{DRAFT_OPTION} {path}: {_joined(lost)}. sglang-dflash does not run such a draft, and "
            "SGLang's own DFLASH worker may run it otherwise than it was trained, with hardly a "
            "proposal accepted. Use a DFlash or DFlash2 draft made for this target; with "
            "SGLANG_DFLASH_WORKER=upstream SGLang's worker tries on CUDA."
        )
    return _joined(reasons) or None


def _joined(reasons: list[Reason]) -> str:
    return "; ".join(dict.fromkeys(reason.text for reason in reasons))


def _asks_for_lora(settings: Any) -> bool:
    # SGLang takes adapters that are named for the flag, but after this has to be known.
    named = bool(settings.lora_paths)
    return named if settings.enable_lora is None else settings.enable_lora


def _asks_for_quantised_draft(settings: Any) -> bool:
    # Where the user says nothing SGLang copies the target's --quantization; ours loads floats.
    named = settings._speculative_draft_quantization_explicitly_set
    return bool(named) and settings.speculative_draft_model_quantization != "unquant"


def check_start(settings: Any, options: Options, target: Target) -> None:
    """Refuse what can be known to be wrong before anything is loaded.

    Args:
        settings: SGLang's resolved server arguments, read by name.
        options: the plugin's own.
        target: what the draft must fit.

    Raises:
        ValueError: an option that changes what is drawn and that DFLASH does not honour, a grammar
            back end that cannot take tokens back, one of the plugin's own that the block size
            forbids, or a token map of another model.
        UnsupportedCheckpoint: the path holds no draft that agrees with its own config and with the
            target, the draft is made for a shorter context, or the block size is impossible.
    """
    _refuse_options(settings, options)
    path = settings.speculative_draft_model_path
    config = check_checkpoint(path, settings.speculative_draft_model_revision)
    stated = (settings.speculative_num_draft_tokens, settings.speculative_dflash_block_size)
    block_size = next((size for size in stated if size is not None), config.block_size)
    if block_size is None:
        raise UnsupportedCheckpoint(
            f"{DRAFT_OPTION} {path}: its config.json states no block_size; give the size it was "
            "trained at with --speculative-num-draft-tokens (the anchor included)"
        )
    check_block_size(block_size, config)
    options.check_start(block_size)
    if 2 * block_size >= target.context_length:
        raise UnsupportedCheckpoint(
            f"--speculative-num-draft-tokens {block_size}: each request reserves two blocks, which "
            f"a context of {target.context_length} tokens cannot hold. Use fewer than "
            f"{target.context_length // 2}; the draft was trained at {config.block_size}."
        )
    if target.context_length > config.context_length and not target.outgrows_draft:
        raise UnsupportedCheckpoint(
            f"{DRAFT_OPTION} {path} was made for {config.context_length} positions, and the target "
            f"is served with a context of {target.context_length}. Serve it with --context-length "
            f"{config.context_length}, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1: answers "
            "stay exact, and beyond that length fewer proposals may be accepted."
        )
    check_target(
        config,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_num_layers=target.num_layers,
        tp_size=settings.tp_size,
        has_tokenizer=not settings.skip_tokenizer_init,
    )
    folder = draft_folder(path, settings.speculative_draft_model_revision)
    token_map = token_map_of(folder, settings.speculative_token_map)
    if token_map is not None:
        named = () if settings.speculative_token_map else (DRAFT_OPTION,)
        read_token_map(token_map, target.vocab_size, *named)


def _refuse_options(settings: Any, options: Options) -> None:
    """Refuse options that DFLASH does not honour, and those that contradict each other."""
    if settings.enable_watermark:
        raise ValueError(
            "--enable-watermark: DFLASH verifies without SGLang's watermark, so texts would lack "
            "it. Serve without the option, or without --speculative-algorithm."
        )
    if settings.speculative_adaptive and options.budget == "fixed":
        raise ValueError(
            "--speculative-adaptive asks for widths that follow the load, and the budget is fixed "
            "(SGLANG_DFLASH_BUDGET or the file of --speculative-adaptive-config): leave one out"
        )
    for kind in ("single", "acc"):
        threshold = getattr(settings, f"speculative_accept_threshold_{kind}")
        if threshold != 1.0:
            raise ValueError(
                f"--speculative-accept-threshold-{kind} {threshold:g}: it would accept tokens that "
                "plain decoding does not draw, and DFLASH here is exact. Leave it out, or have "
                "SGLang's own worker by SGLANG_DFLASH_WORKER=upstream."
            )
    if settings.enable_pdmux:
        raise ValueError(
            "--enable-pdmux: its prefill goes past the speculative worker, so that there is no "
            "draft state to decode with. Serve without the option, or without "
            "--speculative-algorithm."
        )
    if options.trace is not None and settings.dp_size > 1:
        raise ValueError(
            f"SGLANG_DFLASH_TRACE with --dp-size {settings.dp_size}: one file cannot hold the "
            "steps of several schedulers. Unset it, or trace a server of one replica."
        )
    if settings.sampling_backend not in (None, *_SAMPLING_BACKENDS):
        raise ValueError(
            f"--sampling-backend {settings.sampling_backend}: DFLASH knows the law that "
            f"{', '.join(_SAMPLING_BACKENDS)} draw from. Choose one of them, or serve without "
            "--speculative-algorithm."
        )
    if settings.grammar_backend not in (None, *_GRAMMAR_BACKENDS):
        raise ValueError(
            f"--grammar-backend {settings.grammar_backend}: DFLASH asks a grammar about several "
            "tokens at once and takes some back, which outlines cannot and others are not known "
            f"to do. Choose one of {', '.join(_GRAMMAR_BACKENDS)}, or serve without "
            "--speculative-algorithm."
        )


def check_back_end(settings: Any, gpu_generation: int) -> None:
    """Refuse what the budget cannot work with on a GPU.

    Args:
        settings: SGLang's resolved server arguments, read by name.
        gpu_generation: major compute capability.

    Raises:
        ValueError: verify graphs cannot have unequal widths with these settings.
    """
    part = "decode" if settings.speculative_attention_mode == "decode" else "prefill"
    named = getattr(settings, f"{part}_attention_backend")
    option = f"--{part}-attention-backend" if named else "--attention-backend"
    found = named or settings.attention_backend
    way_out = f"Or choose another {BUDGET}: 'auto' verifies whole blocks."
    if found not in _RAGGED_BACK_ENDS or (found == "trtllm_mha" and gpu_generation != _BLACKWELL):
        raise ValueError(
            f"{BUDGET} is 'measured' with {option} {found}, compute capability {gpu_generation}.x: "
            "it needs verify graphs of unequal widths, which "
            f"{', '.join(_RAGGED_BACK_ENDS)} have (the last on {_BLACKWELL}.x alone). Choose one "
            f"of them. {way_out}"
        )
    refused = {
        "--disable-cuda-graph": settings.disable_cuda_graph,
        "--cuda-graph-backend-decode disabled": _has_no_decode_graphs(settings),
        "--disable-cuda-graph-padding": settings.disable_cuda_graph_padding,
        "--enable-two-batch-overlap": settings.enable_two_batch_overlap,
    }
    if stated := next((name for name, is_set in refused.items() if is_set), None):
        raise ValueError(
            f"{BUDGET} is 'measured' with {stated}: verify graphs of unequal widths do not go with "
            f"it. Leave it out. {way_out}"
        )


def _has_no_decode_graphs(settings: Any) -> bool:
    return str(settings.cuda_graph_config.decode.backend) == "disabled"
