# SPDX-License-Identifier: Apache-2.0
"""The DFLASH worker: prefill and the decode step, as SGLang's scheduler calls them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

from sglang_dflash import __version__
from sglang_dflash.budget.policy import StepFacts
from sglang_dflash.draft.block import Block, BlockBuilder
from sglang_dflash.draft.checks import with_mask_token
from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.forward import DraftForward, build_draft_worker
from sglang_dflash.draft.model import served_draft_config
from sglang_dflash.draft.proposer import Proposal, propose_nothing
from sglang_dflash.options import Options
from sglang_dflash.state import DFlashState
from sglang_dflash.sweep import width_policy
from sglang_dflash.verify.constraints import Constraints
from sglang_dflash.verify.decide import Decider, options_of, sampled_rows, sampling_of
from sglang_dflash.verify.first_rank import FirstRank
from sglang_dflash.verify.forward import verify_block
from sglang_dflash.verify.graphs import context_tokens, host_waits, row_buckets
from sglang_dflash.verify.rows import Rows
from sglang_dflash.verify.transfer import to_device

__all__ = ["DFlashWorker"]

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]


class DFlashWorker(BaseSpecWorker):
    """Serves `--speculative-algorithm DFLASH`.

    The draft shares the target's slots, page table, radix tree and reservations: a token's context
    lies in the draft's pool at the slot where the target keeps that token.
    """

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self.device = target_worker.device
        self.block_size = int(get_spec().speculative_num_draft_tokens)
        self.speculative_num_draft_tokens = self.block_size  # SGLang's metrics read it
        self._target_worker = target_worker
        target = target_worker.model_runner
        group = get_dp_tp_group()
        self._ranks, self._first_rank = SpecTpSync(group), FirstRank(group)
        self._decider = Decider(target.sampler, self._ranks)
        config = served_draft_config()
        self._draft_worker = build_draft_worker(server_args, gpu_id, nccl_port, target_worker)
        self._draft = DraftForward(self._draft_worker, target.model, self.block_size)
        vocab_size = target.model_config.vocab_size
        self._mask_token_id = with_mask_token(
            config, target_worker.tokenizer, vocab_size
        ).mask_token_id
        self._log_start(config)

    # ---- what the scheduler calls -------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: None = None,
    ) -> GenerationBatchResult:
        """Run one step: a prefill chunk, or a block of decoding.

        Args:
            batch: the scheduler's batch; the scheduler restores what the step changes in it.
            on_publish: takes the new lengths [n] as soon as they are known (overlap scheduling).
            grammar_barrier: makes the grammars know what the previous step committed.
            pp_proxy_tensors: unused, pipeline parallelism is refused at start-up.
        """
        with torch.inference_mode():
            if batch.forward_mode.is_extend():
                return self._prefill(batch, on_publish, grammar_barrier)
            return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        """Run the target over prompt rows and inject their context at once.

        At once, because the radix tree may adopt the slots as soon as this returns.
        """
        self._wait_for_fused_hicache_load(batch)
        self._constraints.admit(batch, grammar_barrier)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        self._ranks.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids)
        self._constraints.count_first(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        output = result.logits_output
        features, output.hidden_states = output.hidden_states, None
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        self._draft.inject(features, _prompt_positions(batch, self.device), plan)
        result.next_draft_input = DFlashState(bonus_tokens=result.next_token_ids.to(torch.int64))
        return result

    def _decode(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        """Block, propose, verify, constrain, decide, publish, inject."""
        batch.sampling_info = options_of(batch.sampling_info, batch.reqs)
        prefix_lens = batch.seq_lens
        block = self._blocks.build(
            batch.spec_info.bonus_tokens,
            prefix_lens,
            batch.req_pool_indices,
            self._target_worker.model_runner.req_to_token_pool.req_to_token,
        )
        plan = self._plan_slots(batch, block)
        proposal = self._propose(batch, block, plan)
        rows = self._rows(batch, proposal)
        chain = self._constraints.chain(batch, block, proposal.tokens, rows)
        verified = verify_block(
            self._target_worker, batch, block, proposal.tokens, rows, plan, self._buckets
        )
        self._constraints.apply(
            batch, verified.logits, rows, proposal.tokens, chain, grammar_barrier
        )
        verdict = self._decider.decide(batch, block, proposal, verified)
        self._constraints.count(batch, verdict)
        new_seq_lens = prefix_lens + verdict.num_committed
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._draft.inject(
            verified.features,
            rows.take(block.positions),
            plan,
            rows.columns,
            later=proposal.is_empty and self._host_waits,
        )
        self._policy.settle(rows, verdict.num_committed - 1)
        return GenerationBatchResult(
            logits_output=verified.result.logits_output,
            next_token_ids=verdict.tokens.flatten(),
            accept_lens=verdict.num_committed,
            cap_lens=rows.widths,  # SGLang's name for them in meta_info and the log
            new_seq_lens=new_seq_lens,
            next_draft_input=DFlashState(bonus_tokens=verdict.next_anchor),
            speculative_num_draft_tokens=self.block_size,
            can_run_cuda_graph=verified.result.can_run_cuda_graph,
            routed_experts_output=verified.result.routed_experts_output,
            indexer_topk_output=verified.result.indexer_topk_output,
        )

    def _propose(self, batch: ScheduleBatch, block: Block, plan: KVLocPlan) -> Proposal:
        """Return the draft's proposals, or none where plain decoding pays better."""
        facts = StepFacts(
            num_requests=len(block.ids),
            context_tokens=context_tokens(batch, block, host_waits=self._host_waits),
            iteration=batch.forward_iter,
            after_idle=batch.after_idle_gap,
        )
        width, judges = self._agreed([self._policy.draft_width(facts), int(self._policy.judges)])
        if width == 1:
            return propose_nothing(len(block.ids), self.block_size - 1, self.device)
        self._draft.inject_pending()
        self._policy.draft_begins()
        rows = Rows.of([width] * len(block.ids), self.block_size, self.device)
        proposal = self._draft.propose(
            batch,
            block,
            rows,
            plan,
            sampling_of(batch.sampling_info),
            with_confidence=bool(judges),
        )
        self._ranks.sync(SpecTpSyncSite.DFLASH_SELECTOR, proposal.tokens)
        return proposal

    def _rows(self, batch: ScheduleBatch, proposal: Proposal) -> Rows:
        """Return the rows worth verifying."""
        chosen = self._policy.widths(proposal.confidence, sampled_rows(batch.sampling_info))
        if isinstance(chosen, Rows):
            return chosen
        return Rows.of(self._agreed(chosen), self.block_size, self.device)

    def _agreed(self, values: list[int]) -> list[int]:
        """Return the first rank's values: its clock decides for all."""
        ask = self._policy.wants_confidence and not self._policy.agrees
        return self._first_rank.numbers(values) if ask else values

    def _plan_slots(self, batch: ScheduleBatch, block: Block) -> KVLocPlan:
        """Translate the block's slots once, for draft, verify and injection alike."""
        known = batch.seq_lens_cpu is not None
        # Back ends that plan on the device leave the host with an upper bound.
        lens_cpu = batch.seq_lens_cpu if known else batch.spec_info.reserved_lens_cpu
        plan = self._target_worker.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=lens_cpu,
            write_virtual=block.locs.flatten(),
            read_extent=self.block_size,
        )
        batch.seq_lens_cpu = lens_cpu + self.block_size if known else lens_cpu
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        return plan

    # ---- what the scheduler asks at start-up --------------------------------------------------

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Attention back ends a step touches; they decide whether the host must know lengths."""
        runners = (self._target_worker.model_runner, self._draft_worker.model_runner)
        return tuple(runner.attn_backend for runner in runners)

    def weight_update_runners(self) -> list:
        """None: weight updates are the target's, whose tensors a strict draft would refuse."""
        return []

    def alloc_memory_pool(
        self,
        memory_pool_config: MemoryPoolConfig | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator | None = None,
    ) -> None:
        """Give the draft a pool with the target's slots, and size what is kept between steps."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._blocks = BlockBuilder(
            self.block_size, self._mask_token_id, req_to_token_pool.size, self.device
        )
        rows = req_to_token_pool.req_to_token.shape[0]
        vocab_size = self._target_worker.model_runner.model_config.vocab_size
        self._constraints = Constraints(rows, vocab_size, self.device)

    def init_cuda_graphs(self) -> None:
        """Capture the draft's graph where the platform has graphs and they are on."""
        wanted = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        possible = (
            not current_platform.is_out_of_tree() or current_platform.capabilities.graph_capture
        )
        self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=wanted and possible)
        target = self._target_worker.model_runner
        self._buckets, self._host_waits = row_buckets(target), host_waits(target)
        self._policy = width_policy(
            Options.read(os.environ, get_spec().speculative_adaptive_config),
            target,
            self._draft,
            self._first_rank,
            block_size=self.block_size,
            max_requests=self._blocks.max_requests,
        )

    def _log_start(self, config: DraftConfig) -> None:
        if get_parallel().tp_rank == 0:
            logger.info(
                "DFLASH is served by sglang-dflash %s: block size %d, draft %s (%d layers, target "
                "layers %s, %s)",
                __version__,
                self.block_size,
                get_spec().speculative_draft_model_path,
                config.num_layers,
                list(config.target_layer_ids),
                str(self._draft_worker.model_runner.dtype).removeprefix("torch."),
            )


def _prompt_positions(batch: ScheduleBatch, device: torch.device | str) -> torch.Tensor:
    """Return [T] int64, the absolute position of each prompt row.

    Made of what the host knows: reading lengths from the device would wait for the prefill.
    """
    spans = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    positions = [torch.arange(start, start + length) for start, length in spans]
    return to_device(torch.cat(positions), device)
