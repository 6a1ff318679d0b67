# SPDX-License-Identifier: Apache-2.0
"""What each running request has written so far, on the device, for penalties and minimum lengths.

SGLang counts a request's output on the host, which under overlap scheduling learns of a token one
step late. These counts are fed by the step that commits the tokens, so they are never behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_dflash.verify.logits import Penalties
from sglang_dflash.verify.transfer import to_device

__all__ = ["OutputCounts", "OutputOptions"]


@dataclass(frozen=True)
class OutputOptions:
    """What a request asks about its own output, when it is prefilled.

    Attributes:
        row: its row of the page table, which is its row here.
        num_prompt_tokens: tokens before its output.
        output_ids: tokens it has written already: none, or those before it was retracted.
        frequency: frequency penalty; 0 is none.
        presence: presence penalty; 0 is none.
        repetition: repetition penalty; 1 is none.
        min_new_tokens: how long the output must become.
    """

    row: int
    num_prompt_tokens: int
    output_ids: Sequence[int]
    frequency: float
    presence: float
    repetition: float
    min_new_tokens: int

    @property
    def penalised(self) -> bool:
        """Whether tokens must be counted for this request."""
        return (self.frequency, self.presence, self.repetition) != (0.0, 0.0, 1.0)


class OutputCounts:
    """One row a request, by its row of the page table.

    The table of counts, [rows, V] float32 (see `Penalties.sums`), is made when the first penalised
    request is prefilled: a server that never sees one does not pay for it.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._counts: torch.Tensor | None = None
        # frequency, presence, repetition
        self._penalties = torch.zeros(num_rows, 3, dtype=torch.float32, device=device)
        # prompt tokens, minimum of new tokens
        self._lengths = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)

    def admit(self, requests: Sequence[OutputOptions]) -> None:
        """Write what is known of requests about to be prefilled; their rows' past is forgotten."""
        if not requests:
            return
        rows = self._to_device([request.row for request in requests], torch.int64)
        self._lengths[rows] = self._to_device(
            [[request.num_prompt_tokens, request.min_new_tokens] for request in requests],
            torch.int64,
        )
        self._penalties[rows] = self._to_device(
            [[request.frequency, request.presence, request.repetition] for request in requests],
            torch.float32,
        )
        for request in requests:
            if request.penalised:
                self._recount(request)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor, num_committed: torch.Tensor) -> None:
        """Count what a step committed.

        Args:
            rows: [n] int64.
            tokens: [n, W] int64, each request's committed tokens first.
            num_committed: [n] int32 or int64.
        """
        if self._counts is None:
            return
        places = torch.arange(tokens.shape[1], device=tokens.device)
        committed = places < num_committed.unsqueeze(1)
        amounts = Penalties.step(self._penalties[rows, :1]) * committed
        self._counts.index_put_((rows.unsqueeze(1), tokens), amounts, accumulate=True)

    def penalties(self, rows: torch.Tensor) -> Penalties | None:
        """Return the penalties of the requests at `rows` ([n] int64); None if none is penalised."""
        if self._counts is None:
            return None
        return Penalties(self._counts[rows], *self._penalties[rows].split(1, dim=1))

    def lengths(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([n], [n]) int64: prompt tokens and minimum of new tokens of the `rows` ([n])."""
        return self._lengths[rows].unbind(1)

    def _recount(self, request: OutputOptions) -> None:
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        counts = self._counts[request.row].zero_()
        if request.output_ids:
            tokens = self._to_device(list(request.output_ids), torch.int64)
            step = Penalties.step(self._penalties[request.row, 0])
            counts.index_add_(0, tokens, step.expand(tokens.shape))

    def _to_device(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self._device)
