# SPDX-License-Identifier: Apache-2.0
"""What requests forbid or make less likely, put on the logits of every verified row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dflash.draft.block import Block
from sglang_dflash.verify.accept import Verdict
from sglang_dflash.verify.counts import OutputCounts, OutputOptions
from sglang_dflash.verify.logits import add_bias, forbid_early_stops, penalise
from sglang_dflash.verify.processors import CustomProcessors, needs_history
from sglang_dflash.verify.rows import Rows

__all__ = ["Constraints"]


class Constraints:
    """Penalties, minimum lengths, grammars, biases and custom processors, in SGLang's order.

    Source: `ModelRunner._preprocess_logits` and `Sampler._preprocess_logits`, row by row.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self._counts = OutputCounts(num_rows, vocab_size, device)
        self._processors = CustomProcessors()

    # ---- prefill: SGLang samples, and we complete what it knows -------------------------------

    def admit(self, batch: ScheduleBatch, grammar_barrier: Callable[[], None] | None) -> None:
        """Begin the counts of the requests that `batch` prefills, and sample with all counts.

        SGLang's own are right for a new request only: one that was retracted, or that a mixed
        chunk decodes, has written tokens which they do not know.
        """
        decoding = {id(request) for request in batch.decoding_reqs or ()}
        self._counts.admit([_options(r) for r in batch.reqs if id(r) not in decoding])
        if _counts_matter(batch.sampling_info):
            self._complete_penalties(batch)
        if not decoding:
            return
        if batch.has_grammar and grammar_barrier is not None:
            grammar_barrier()
        if needs_history(batch.sampling_info):
            self._processors.complete(batch)

    def count_first(self, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
        """Count the tokens [n] that a prefill sampled."""
        self._count(batch, tokens.long().unsqueeze(1), torch.ones_like(tokens), 0)

    # ---- decode -------------------------------------------------------------------------------

    def chain(
        self, batch: ScheduleBatch, block: Block, proposals: torch.Tensor, rows: Rows
    ) -> GrammarTree | None:
        """Start copying anchors and proposals to the host, where something will read them.

        As many as the widest request has rows: a grammar walks them one by one.

        Args:
            batch: the n requests.
            block: with their anchors.
            proposals: [n, B-1] int64.
            rows: those that are verified.

        Returns:
            [n, W] tokens on their way, W the rows of the widest.
        """
        if not (batch.has_grammar or needs_history(batch.sampling_info)):
            return None
        verified = proposals[:, : rows.widest - 1]
        return GrammarTree.from_linear_chain(torch.cat([block.ids[:, :1], verified], dim=1))

    def apply(
        self,
        batch: ScheduleBatch,
        out: torch.Tensor,
        rows: Rows,
        proposals: torch.Tensor,
        chain: GrammarTree | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> None:
        """Constrain every row.

        Args:
            batch: the n requests.
            out: [M, V] logits, changed in place.
            rows: which rows they are.
            proposals: [n, B-1] int64.
            chain: what `chain` returned before the target ran.
            grammar_barrier: makes the grammars know the previous step's tokens.
        """
        info = batch.sampling_info
        if _counts_matter(info):
            self._penalise(batch, out, rows, proposals)
        if batch.has_grammar:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=chain,
                sampling_info=info,
                device=out.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                of_blocks = mask.vocab_mask.unflatten(0, (-1, rows.widest))
                mask._replace(vocab_mask=rows.take(of_blocks)).apply(out)
        if info.logit_bias is not None:
            add_bias(out, rows, info.logit_bias)
        if info.has_custom_logit_processor:
            tokens = chain.resolve()[-1] if needs_history(info) else None
            self._processors.apply(batch, out, rows, tokens)
        sanitize_nan_logits(out, "dflash verify")

    def count(self, batch: ScheduleBatch, verdict: Verdict) -> None:
        """Count what a step committed."""
        self._count(batch, verdict.tokens, verdict.num_committed, 1)

    def _count(
        self, batch: ScheduleBatch, tokens: torch.Tensor, num_committed: torch.Tensor, anchors: int
    ) -> None:
        if _counts_matter(batch.sampling_info):
            self._counts.add(batch.req_pool_indices, tokens, num_committed)
        if needs_history(batch.sampling_info):
            num_output = self._lengths(batch, anchors)[0] + num_committed
            self._processors.remember(batch, tokens, num_committed, num_output)

    def _complete_penalties(self, batch: ScheduleBatch) -> None:
        info = batch.sampling_info
        num_output, min_new_tokens = self._lengths(batch, 0)
        too_early = (num_output < min_new_tokens).unsqueeze(1)
        additive = torch.where(too_early, info.acc_additive_penalties, 0.0)
        penalties = self._counts.penalties(batch.req_pool_indices)
        if penalties is not None:
            additive -= penalties.subtracted
            info.acc_scaling_penalties = penalties.factors
        info.acc_additive_penalties = additive

    def _penalise(
        self, batch: ScheduleBatch, out: torch.Tensor, rows: Rows, proposals: torch.Tensor
    ) -> None:
        penalties = self._counts.penalties(batch.req_pool_indices)
        if penalties is not None:
            penalise(out, rows, proposals, penalties)
        if any(_may_be_short(request) for request in batch.reqs):
            # Nothing is counted into SGLang's own penalties, so all they hold is the stop tokens.
            stop_bias = batch.sampling_info.acc_additive_penalties
            forbid_early_stops(out, rows, stop_bias, *self._lengths(batch, 1))

    def _lengths(self, batch: ScheduleBatch, anchors: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([n], [n]): tokens in the output and the minimum; `anchors` have no K/V yet."""
        num_prompt, min_new_tokens = self._counts.lengths(batch.req_pool_indices)
        return batch.seq_lens + anchors - num_prompt, min_new_tokens


def _counts_matter(info: SamplingBatchInfo) -> bool:
    # SGLang fills it exactly where a request of the batch has a penalty or a minimum length.
    return info.acc_additive_penalties is not None


def _may_be_short(request: Req) -> bool:
    # The host may know of fewer tokens than there are, never of more.
    return len(request.output_ids) < request.sampling_params.min_new_tokens


def _options(request: Req) -> OutputOptions:
    params = request.sampling_params
    return OutputOptions(
        row=request.kv.req_pool_idx,
        num_prompt_tokens=len(request.origin_input_ids),
        output_ids=request.output_ids,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        repetition=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
    )
