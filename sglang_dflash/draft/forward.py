# SPDX-License-Identifier: Apache-2.0
"""The draft pass: a block through the draft model, on SGLang's runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import nn

from sglang_dflash.draft.block import Block
from sglang_dflash.draft.borrowed import BorrowedCopies
from sglang_dflash.draft.checkpoint import draft_folder
from sglang_dflash.draft.hot_head import HotHead
from sglang_dflash.draft.model import DFlashDraftModel
from sglang_dflash.draft.path import proposer_of
from sglang_dflash.draft.proposer import (
    Proposal,
    Sampling,
    VocabularyHead,
)
from sglang_dflash.draft.schema import ARCHITECTURES
from sglang_dflash.draft.token_map import read_token_map, token_map_of
from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.verify.rows import Rows

__all__ = [
    "DraftForward",
    "VerifyRows",
    "build_draft_worker",
    "verify_batch",
    "vocabulary_head",
]

logger = logging.getLogger(__name__)

_MOST_PENDING = 8  # steps whose context waits to be injected together


def build_draft_worker(
    server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
) -> TpModelWorker:
    """Load the draft beside the target and return its worker.

    The draft computes in the target's dtype whatever its own config says: the features it reads and
    the embedding and head it borrows are in that dtype.
    """
    target_config = target_worker.model_runner.model_config

    class DraftTpWorker(TpModelWorker):
        def _init_model_config(self) -> None:
            super()._init_model_config()
            self.model_config.dtype = target_config.dtype

    ModelRegistry.models |= dict.fromkeys(ARCHITECTURES, DFlashDraftModel)
    return build_draft_tp_worker(
        server_args=server_args,
        gpu_id=gpu_id,
        nccl_port=nccl_port,
        target_model_config=target_config,
        algo_label="DFLASH",
        draft_worker_cls=DraftTpWorker,
    ).draft_worker


def block_embedding(target_model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that embeds a block: the target's embedding times its noise scale."""
    embed = target_model.get_input_embeddings()
    # Gemma-like targets say by how much the embeddings of a draft's block are scaled.
    scale = getattr(target_model, "get_dflash_noise_embedding_scale", None)
    if scale is None:
        return embed.forward
    factor = float(scale())
    return lambda ids: embed(ids) * factor


def vocabulary_head(target_model: nn.Module) -> VocabularyHead:
    """Return this rank's shard of the target's output head, cut to the token map if there is one.

    Raises:
        UnsupportedCheckpoint: there is no such head, or it carries added tokens apart.
        ValueError: `--speculative-token-map` does not fit it.
    """
    head = getattr(target_model, "lm_head", None)
    shard = getattr(head, "shard_indices", None)
    if shard is None:
        raise UnsupportedCheckpoint(
            f"the target's class {type(target_model).__name__} has no lm_head that is split by "
            "vocabulary, and the draft borrows one: set SGLANG_DFLASH_WORKER=upstream"
        )
    if shard.num_added_elements:
        raise UnsupportedCheckpoint(
            f"the target's lm_head has {shard.num_added_elements} tokens added by LoRA adapters; "
            "serve without them, or set SGLANG_DFLASH_WORKER=upstream"
        )
    tp_size = get_parallel().tp_size
    gather = tensor_model_parallel_all_gather if tp_size > 1 else None
    spec = get_spec()
    map_path = token_map_of(_served_folder(), spec.speculative_token_map)
    if map_path is not None and HotHead.can_cut(head):
        token_map = read_token_map(map_path, head.org_vocab_size)
        hot = HotHead(head, token_map, tp_size)
        logger.info("DFLASH proposes from %d tokens of %s", len(token_map), map_path)
        return VocabularyHead(
            hot.project, len(hot.token_ids), gather=gather, token_ids=hot.token_ids
        )
    if map_path is not None:
        said = (
            f"the target's output head is quantised, so its rows of {map_path} cannot be taken one "
            "by one"
        )
        if spec.speculative_token_map is not None:
            raise ValueError(f"--speculative-token-map: {said}: leave the option out")
        logger.info("DFLASH proposes from the whole vocabulary: %s", said)
    return VocabularyHead(
        lambda rows: head.quant_method.apply(head, rows, None),
        shard.num_org_elements,
        shard.org_vocab_start_index,
        gather,
    )


def _served_folder(*, weights: bool = False) -> Path:
    spec = get_spec()
    return draft_folder(
        spec.speculative_draft_model_path, spec.speculative_draft_model_revision, weights=weights
    )


class _Rows(NamedTuple):
    """Context rows to inject."""

    features: torch.Tensor  # [M, K*H]
    positions: torch.Tensor  # [M] int64
    locs: torch.Tensor  # [M] int64


class DraftForward:
    """Proposes tokens for a block, and keeps the draft's context up to date."""

    def __init__(
        self, draft_worker: TpModelWorker, target_model: nn.Module, block_size: int
    ) -> None:
        self._runner = draft_worker.model_runner
        self._model: DFlashDraftModel = self._runner.model
        self._block_size = block_size
        self._model.borrow_embedding(block_embedding(target_model))
        head = vocabulary_head(target_model)
        BorrowedCopies(_served_folder(weights=True)).check(
            target_model.get_input_embeddings(), target_model.lm_head
        )
        selector, config = self._model.candidate_selector, self._model.draft_config
        self._proposer = proposer_of(selector, head, config)
        self._spec_infos: dict[int, DFlashVerifyInput] = {}
        self._pending: list[_Rows] = []

    def propose(
        self,
        batch: ScheduleBatch,
        block: Block,
        rows: Rows,
        plan: KVLocPlan,
        sampling: Sampling | None,
        *,
        with_confidence: bool = False,
    ) -> Proposal:
        """Return proposals for the mask rows of `block`: the best tokens, or drawn where sampled.

        Where context may wait, `inject_pending` comes before.

        Writes the rows' own K/V into the draft pool; `inject` overwrites it with the context's.

        Args:
            batch: the n requests.
            block: where they stand.
            rows: what the draft runs over: as many rows of each block, 2 at least.
            plan: where the blocks' K/V goes.
            sampling: how the requests are sampled; None where all are greedy.
            with_confidence: whether the probabilities of the proposals are wanted too.

        Returns:
            Proposals for all B-1 mask rows, those beyond `rows` empty; their confidence, without
            the empty ones.
        """
        width = rows.widths_cpu[0]
        taken = VerifyRows(*(rows.take(values) for values in block))
        spec_info = self._spec_info(width)
        forward_batch = verify_batch(self._runner, batch, taken, spec_info, plan, rows.columns)
        output = self._runner.forward(forward_batch).logits_output.hidden_states
        hidden = output.view(len(block.ids), width, -1)
        proposal = self._proposer.propose(
            hidden,
            block.ids[:, 0],
            sampling,
            block.positions[:, :width],
            with_confidence=with_confidence,
        )
        return proposal.filled(self._block_size - 1)

    def _spec_info(self, width: int) -> DFlashVerifyInput:
        """Return what says that each request has `width` rows, without logits or features."""
        if width not in self._spec_infos:
            empty = torch.empty(0, dtype=torch.int64, device=self._runner.device)
            self._spec_infos[width] = DFlashVerifyInput(
                draft_token=empty,
                positions=empty,
                draft_token_num=width,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
        return self._spec_infos[width]

    def inject(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        plan: KVLocPlan,
        columns: torch.Tensor | None = None,
        *,
        later: bool = False,
    ) -> None:
        """Turn context features [M, K*H] at `positions` [M] into the draft's K/V.

        A verify step injects refused rows too: they lie beyond the committed length, where nothing
        reads, and the next block overwrites them. So no row needs to be selected, and none counted.

        Args:
            features: [M, K*H].
            positions: [M] int64.
            plan: where the K/V goes.
            columns: [M] int64, the rows' places in the plan's window; None where it is theirs.
            later: wait for a few steps to go together, or for `inject_pending`. Only for steps
                without the draft, on a device that the host waits for. A slot may change hands
                meanwhile: its old owner's rows go first, for a request that ends changes the
                number of rows and one that comes is injected at once.
        """
        locs = plan.write_ids(self._runner.kv_index_translator, cols=columns)
        # Tensor parallelism may have padded the forward's rows.
        rows = _Rows(features[: locs.shape[0]], positions, locs)
        if not later:
            self.inject_pending()
            self._model.inject(*rows, self._runner.token_to_kv_pool)
            return
        if self._pending and len(self._pending[0].locs) != len(locs):
            self.inject_pending()
        self._pending.append(_Rows(*(values.clone() for values in rows)))  # of kept buffers
        if len(self._pending) >= _MOST_PENDING:
            self.inject_pending()

    def inject_pending(self) -> None:
        """Inject what waits; it must not wait when the draft runs."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        rows = pending[0]
        if len(pending) > 1:
            rows = _Rows(*(torch.cat(parts) for parts in zip(*pending, strict=True)))
        self._model.inject(*rows, self._runner.token_to_kv_pool)


class VerifyRows(NamedTuple):
    """The rows of a forward over blocks: [M] int64 each."""

    ids: torch.Tensor
    positions: torch.Tensor
    locs: torch.Tensor


def verify_batch(
    runner: ModelRunner,
    batch: ScheduleBatch,
    rows: VerifyRows,
    spec_info: DFlashVerifyInput,
    plan: KVLocPlan,
    columns: torch.Tensor | None = None,
) -> ForwardBatch:
    """Return the forward of one model over blocks, made without a scheduler's help.

    Args:
        runner: the model's.
        batch: the n requests: their rows of the page table and their lengths.
        rows: what to run.
        spec_info: says what the forward captures, and the rows of each request.
        plan: where the blocks' K/V goes.
        columns: [M] int64, the rows' places in the plan's window; None where it is theirs.
    """
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(batch.req_pool_indices),
        input_ids=rows.ids,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=rows.locs,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
        positions=rows.positions,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        capture_hidden_mode=spec_info.capture_hidden_mode,
        global_num_token_non_padded_cpu=len(rows.ids),
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
    plan.bind(forward_batch, runner.kv_index_translator, cols=columns)
    return forward_batch
