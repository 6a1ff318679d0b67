# SPDX-License-Identifier: Apache-2.0
"""What a batch carries from step to step: anchors and reserved KV slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_len_per_decode,
    get_alloc_reserve_per_decode,
)
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.utils.common import async_h2d

__all__ = ["DFlashState", "reserved_lengths"]


def reserved_lengths(
    committed: list[int],
    allocated: list[int],
    *,
    reserve: int,
    page_size: int,
    row_width: int,
    ahead: int = 0,
) -> list[int]:
    """Return how many positions each request must have slots for before the next step.

    The scheduler may know a request's length one step late, so `reserve` is two blocks. Whole pages
    are taken, and never more than the request's row of the page table can name. Where one request
    needs slots, all get some for later steps too, so that most steps need none.

    Args:
        committed: tokens of each request that the scheduler knows to be committed.
        allocated: positions of each request that have a slot already.
        reserve: positions wanted beyond `committed`.
        page_size: tokens in a page.
        row_width: positions in a row of `req_to_token`.
        ahead: positions taken beyond `reserve` when there is something to take.

    Raises:
        RuntimeError: a row is too narrow for the block that may be written next.
    """
    last_page_end = row_width // page_size * page_size
    if all(done + reserve <= have for done, have in zip(committed, allocated, strict=True)):
        return allocated
    lengths = []
    for done, have in zip(committed, allocated, strict=True):
        wanted = -(-(done + reserve + ahead) // page_size) * page_size
        if done + reserve > last_page_end:
            raise RuntimeError(
                f"a request of {done} tokens needs {done + reserve} positions, its row has "
                f"{last_page_end}: the row was sized without the speculative reserve of {reserve}"
            )
        lengths.append(max(have, min(wanted, last_page_end)))
    return lengths


@dataclass
class DFlashState(SpecInput):
    """The draft-side state of a batch of n requests.

    Attributes:
        bonus_tokens: [n] int64, each request's anchor (SGLang's word for it).
        future_indices: [n], rows of the scheduler's relay; when set, the next step reads the
            anchors from there instead.
        reserved_lens_cpu: [n] int64 on the host, positions that have slots; set before each decode
            step, for back ends that plan without knowing the exact lengths.
    """

    bonus_tokens: torch.Tensor
    future_indices: torch.Tensor | None = None
    reserved_lens_cpu: torch.Tensor | None = None

    # SGLang's relay reads these of every speculative state; DFlash relays its anchor only.
    topk_p = None
    topk_index = None
    hidden_states = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve KV slots for the next step; called by the scheduler before each decode step."""
        batch.maybe_evict_swa()
        requests = batch.reqs
        committed = [request.kv.kv_committed_len for request in requests]
        allocated = [request.kv.kv_allocated_len for request in requests]
        reserve, allocator = get_alloc_reserve_per_decode(), batch.token_to_kv_pool_allocator
        ahead = get_alloc_len_per_decode()
        # The scheduler has made sure of `reserve` alone.
        if allocator.available_size() < len(requests) * (reserve + ahead + allocator.page_size):
            ahead = 0
        lengths = reserved_lengths(
            committed,
            allocated,
            reserve=reserve,
            page_size=allocator.page_size,
            row_width=batch.req_to_token_pool.req_to_token.shape[1],
            ahead=ahead,
        )
        if lengths != allocated:
            _take_slots(batch, allocated, lengths)
        for request in requests:
            request.decode_batch_idx += 1
        # The overlap scheduler replaces these by the published lengths.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)
        self.reserved_lens_cpu = torch.tensor(lengths, dtype=torch.int64)

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep the requests at `new_indices` ([m] int64 on the device; the host copy if known)."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: DFlashState) -> None:
        """Append another batch's requests."""
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


def _take_slots(batch: ScheduleBatch, allocated: list[int], lengths: list[int]) -> None:
    """Take KV slots, so that requests with `allocated` positions have `lengths`."""
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=async_h2d(allocated, dtype=torch.int32, device=batch.device),
        cur_kv_lens_cpu=torch.tensor(allocated, dtype=torch.int32),
        nxt_kv_lens=async_h2d(lengths, dtype=torch.int32, device=batch.device),
        nxt_kv_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
        num_needed_tokens=sum(lengths) - sum(allocated),
        batch=batch,
    )
