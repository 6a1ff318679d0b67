# SPDX-License-Identifier: Apache-2.0
"""Which proposals stand: each request by the rule of its own options, through SGLang's sampler."""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

from sglang_dflash.corrections import draws_by_rank
from sglang_dflash.draft.block import Block
from sglang_dflash.draft.proposer import Proposal, Sampling
from sglang_dflash.verify.accept import Verdict, accept_block, accept_equal, verdict
from sglang_dflash.verify.forward import Verified
from sglang_dflash.verify.logits import Cuts, keep_most_likely, to_probs

__all__ = ["Decider", "sampling_of"]


def sampling_of(info: SamplingBatchInfo) -> Sampling | None:
    """Return how the batch's requests are sampled; None where all are greedy."""
    if info.is_all_greedy:
        return None
    return Sampling(
        info.temperatures, info.top_ks, info.top_ps, info.sampling_seed, draws_by_rank(info)
    )


class Decider:
    """Applies the acceptance rule that keeps a batch's output what plain decoding's would be.

    - Greedy, and seeded: the target's own choice in every row, made by SGLang's sampler; a proposal
      stands while it is that choice. Hence the very tokens of plain decoding.
    - Sampled without a seed: block verification against the law that SGLang's sampler draws from.
      Hence its distribution. A greedy request in such a batch has a law of one token.
    """

    def __init__(self, sampler: Sampler, ranks: SpecTpSync) -> None:
        self._sampler = sampler
        # One rank decides: a near-tie that ranks break differently would part them for good.
        self._ranks = ranks

    def decide(
        self, batch: ScheduleBatch, block: Block, proposal: Proposal, verified: Verified
    ) -> Verdict:
        """Return what n requests commit, and fill in log-probabilities where they are asked for.

        Args:
            batch: the n requests.
            block: where the rows stand.
            proposal: the draft's, [n, B-1].
            verified: the target's constrained logits, [n, B, V]; they are used up.
        """
        info = batch.sampling_info
        logits = verified.logits
        if batch.return_logprob and not info.is_all_greedy:
            logits = logits.clone()
        if info.is_all_greedy:
            decided = self._confirm(proposal, logits.argmax(dim=-1))
        elif info.sampling_seed is not None:
            decided = self._confirm(proposal, self._draw(info, block, logits))
        else:
            decided = self._verify(info, proposal, logits)
        if batch.return_logprob:
            self._add_logprobs(batch, verified, decided)
        return decided

    def _confirm(self, proposal: Proposal, choices: torch.Tensor) -> Verdict:
        self._ranks.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, choices)
        return accept_equal(proposal.tokens, choices)

    def _draw(self, info: SamplingBatchInfo, block: Block, logits: torch.Tensor) -> torch.Tensor:
        """Return [n, B] int64, each row drawn with its request's seed at its own position."""
        n, block_size, _ = logits.shape
        output = LogitsProcessorOutput(next_token_logits=logits.flatten(0, 1))
        drawn = self._sampler(
            output, _each_row(info, block_size), False, [], [], block.positions.flatten()
        )
        return drawn.view(n, block_size).to(torch.int64)

    def _verify(self, info: SamplingBatchInfo, proposal: Proposal, logits: torch.Tensor) -> Verdict:
        n, block_size, _ = logits.shape
        rows = logits.flatten(0, 1)
        each = _each_row(info, block_size)
        to_probs(rows, each.temperatures)
        if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
            keep_most_likely(rows, Cuts(each.top_ks, each.top_ps, each.min_ps, info.max_top_k))
        device = rows.device
        starts = torch.arange(0, n * block_size, block_size, device=device)
        widths = torch.full((n,), block_size, device=device)
        uniforms = torch.rand(n, block_size - 1, device=device)
        accepted = accept_block(
            proposal.tokens, proposal.draft_probs, rows, uniforms, starts, widths
        )
        last = torch.multinomial(accepted.last_law, num_samples=1).squeeze(1)
        decided = verdict(proposal.tokens, accepted.num_accepted, last)
        for values in decided:
            self._ranks.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, values)
        return decided

    def _add_logprobs(self, batch: ScheduleBatch, verified: Verified, decided: Verdict) -> None:
        compute_spec_logprobs(
            batch,
            verified.result.logits_output,
            decided.tokens.flatten(),
            chain_stride=decided.tokens.shape[1],
        )


def _each_row(info: SamplingBatchInfo, block_size: int) -> SamplingBatchInfo:
    """Return the sampling options of n*B rows; what changes logits was applied already."""

    def each(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(block_size, dim=0)

    return dataclasses.replace(
        info,
        temperatures=each(info.temperatures),
        top_ps=each(info.top_ps),
        top_ks=each(info.top_ks),
        min_ps=each(info.min_ps),
        sampling_seed=each(info.sampling_seed),
        grammars=None,
        grammar_mask=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )
