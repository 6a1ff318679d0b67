# SPDX-License-Identifier: Apache-2.0
"""Which proposals stand: each request by the rule of its own options, through SGLang's sampler."""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

from sglang_dflash.corrections import draws_by_rank
from sglang_dflash.draft.block import Block
from sglang_dflash.draft.proposer import Proposal, Sampling
from sglang_dflash.kernels.confirm import confirm
from sglang_dflash.noise import exponential
from sglang_dflash.verify.accept import Verdict, accept_block, verdict
from sglang_dflash.verify.forward import Verified
from sglang_dflash.verify.logits import (
    Cuts,
    Renorms,
    keep_by_value,
    keep_most_likely,
    rows_in_chunk,
    to_probs,
)
from sglang_dflash.verify.rows import Rows

__all__ = ["Decider", "options_of", "sampled_rows", "sampling_of"]

# SGLang's seeded draw sorts, keeps ranks, and makes hashes and noise of 8 bytes.
_SEEDED_COPIES = 10


def options_of(info: SamplingBatchInfo, requests: list[Req]) -> SamplingBatchInfo:
    """Return a batch's options as if it had had these requests from the start.

    In SGLang what one request asks of all, such as a sort, stays when the request has left.
    """
    asked = [request.sampling_params for request in requests]
    sampled = [params for params in asked if params.top_k != 1]
    bounds = [params.top_k for params in sampled]
    has_bias = any(params.logit_bias is not None for params in asked)
    return dataclasses.replace(
        info,
        is_all_greedy=not sampled,
        need_top_k_sampling=any(params.top_k != TOP_K_ALL for params in asked),
        need_top_p_sampling=any(params.top_p != 1.0 for params in asked),
        need_min_p_sampling=any(params.min_p > 0 for params in asked),
        max_top_k=max(bounds, default=1) if TOP_K_ALL not in bounds else None,
        logit_bias=info.logit_bias if has_bias else None,
    )


def sampling_of(info: SamplingBatchInfo) -> Sampling | None:
    """Return how the batch's requests are sampled; None where all are greedy."""
    if info.is_all_greedy:
        return None
    return Sampling(
        info.temperatures, info.top_ks, info.top_ps, info.sampling_seed, draws_by_rank(info)
    )


def sampled_rows(info: SamplingBatchInfo) -> torch.Tensor:
    """Return [n] bool: which requests are sampled; greedy ones have top_k 1."""
    return info.top_ks != 1


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
        self._renorms = _renorms()

    def decide(
        self, batch: ScheduleBatch, block: Block, proposal: Proposal, verified: Verified
    ) -> Verdict:
        """Return what n requests commit, and fill in log-probabilities where they are asked for.

        Args:
            batch: the n requests.
            block: where the rows stand.
            proposal: the draft's, [n, B-1].
            verified: the target's constrained logits, [M, V]; they are used up.
        """
        info, logits, rows = batch.sampling_info, verified.logits, verified.rows
        if batch.return_logprob and not info.is_all_greedy:
            logits = logits.clone()
        if info.is_all_greedy:
            decided = self._confirm(proposal, rows, logits.argmax(dim=-1))
        elif info.sampling_seed is not None:
            decided = self._confirm(proposal, rows, self._draw(info, rows, block, logits))
        else:
            decided = self._verify(info, rows, proposal, logits)
        if batch.return_logprob:
            _add_logprobs(batch, verified, decided)
        return decided

    def _confirm(self, proposal: Proposal, rows: Rows, choices: torch.Tensor) -> Verdict:
        """Accept while the target's choices, [M], are the proposals."""
        self._ranks.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, choices)
        return confirm(proposal.tokens, choices, rows.starts, rows.widths)

    def _draw(
        self, info: SamplingBatchInfo, rows: Rows, block: Block, logits: torch.Tensor
    ) -> torch.Tensor:
        """Return [M] int64, each row drawn with its request's seed at its own position."""
        step = rows_in_chunk(logits, copies=_SEEDED_COPIES)
        columns = (logits, rows.request, rows.take(block.positions))
        drawn = []
        for part, request, positions in zip(*(c.split(step) for c in columns), strict=True):
            output = LogitsProcessorOutput(next_token_logits=part)
            own = _of_rows(info, request)
            drawn.append(self._sampler(output, own, False, [], [], positions))
        return torch.cat(drawn).to(torch.int64)

    def _verify(
        self, info: SamplingBatchInfo, rows: Rows, proposal: Proposal, logits: torch.Tensor
    ) -> Verdict:
        each = _of_rows(info, rows.request)
        to_probs(logits, each.temperatures)
        if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
            cuts = Cuts(each.top_ks, each.top_ps, each.min_ps, info.max_top_k)
            if self._renorms is None:
                keep_most_likely(logits, cuts)
            else:
                in_turn = info.need_min_p_sampling
                keep_by_value(logits, cuts, self._renorms, in_turn=in_turn)
        uniforms = torch.rand(proposal.tokens.shape, device=logits.device)
        accepted = accept_block(
            proposal.tokens, proposal.draft_probs, logits, uniforms, rows.starts, rows.widths
        )
        # The first of exponential clocks; torch.multinomial looks at the law before it draws.
        last = (accepted.last_law / exponential(accepted.last_law)).argmax(dim=-1)
        decided = verdict(proposal.tokens, accepted.num_accepted, last)
        for values in decided:
            self._ranks.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, values)
        return decided


def _renorms() -> Renorms | None:
    """Return the cuts of SGLang's sampler where it draws by flashinfer's; it sorts elsewhere."""
    if get_exec().kernel.sampling_backend not in ("flashinfer", "intel_xpu"):
        return None
    return Renorms(sglang_sampler.top_k_renorm_prob, sglang_sampler.top_p_renorm_prob)


def _add_logprobs(batch: ScheduleBatch, verified: Verified, decided: Verdict) -> None:
    """Fill in the log-probabilities of what was committed, from each token's own row."""
    rows = verified.rows
    columns = torch.arange(rows.widest, device=rows.starts.device)
    # Columns beyond the width repeat the last row: nothing is committed there.
    row_of = rows.starts.unsqueeze(1) + columns.minimum(rows.widths.unsqueeze(1) - 1)
    compute_spec_logprobs(
        batch,
        verified.result.logits_output,
        rows.take(decided.tokens),
        accept_index=row_of,
    )


def _of_rows(info: SamplingBatchInfo, request: torch.Tensor) -> SamplingBatchInfo:
    """Return the sampling options of rows whose requests are `request`, [M] int64.

    What changes logits was applied already.
    """
    seeds = info.sampling_seed
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[request],
        top_ps=info.top_ps[request],
        top_ks=info.top_ks[request],
        min_ps=info.min_ps[request],
        sampling_seed=None if seeds is None else seeds[request],
        grammars=None,
        grammar_mask=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )
