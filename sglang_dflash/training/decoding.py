# SPDX-License-Identifier: Apache-2.0
"""Texts being decoded together on transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dflash.training.captured import (
    Capture,
    Laws,
    Text,
    assembled,
    captured_features,
    likely_tokens,
)
from sglang_dflash.training.decode_cache import decode_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

__all__ = ["DecodingBatch"]


class DecodingBatch:
    """Texts being decoded: the target's cache, and the rows kept of each text so far."""

    def __init__(
        self,
        target: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        keep: Capture,
        top_k: int,
        generator: torch.Generator,
    ) -> None:
        self._target = target
        self._keep = keep
        self._generator = generator
        self._cache = decode_cache()
        self._prompts = [list(prompt) for prompt in prompts]
        self._temperatures = torch.tensor(temperatures, dtype=torch.float32)
        self._top_k = top_k
        self._rows = list(range(len(prompts)))  # text number of each row of the batch
        self.alive = set(self._rows)
        self._answers: list[list[int]] = [[] for _ in prompts]
        self._features: list[list[torch.Tensor]] = [[] for _ in prompts]
        self._laws: list[list[Laws]] = [[] for _ in prompts]
        self._logits: torch.Tensor  # [n, V], of each row's next token
        self._prefill()

    def _prefill(self) -> None:
        """Read all prompts, padded at the left so that they end together."""
        width = max(map(len, self._prompts))
        ids = torch.zeros((len(self._prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(self._prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._mask = mask
        features = self._forward(ids, (mask.cumsum(1) - 1).clamp(min=0))
        for row, prompt in enumerate(self._prompts):
            self._features[row].append(features[row, width - len(prompt) :].clone())

    def choose(self) -> None:
        """Draw each row's next token."""
        values, likely = self._logits.float().topk(min(self._top_k, self._logits.shape[1]), dim=1)
        values, likely = values.cpu(), likely.cpu()
        uniforms = torch.rand(values.shape, generator=self._generator).clamp(min=1e-20)
        noise = -torch.log(-torch.log(uniforms))
        scores = values + noise * self._temperatures[:, None]
        drawn = likely.gather(1, scores.argmax(1, keepdim=True))[:, 0]
        # `topk` breaks ties, frequent in bfloat16, in another way than every greedy decoder.
        greedy = self._logits.max(dim=1).indices.cpu()
        self._chosen = torch.where(self._temperatures > 0, drawn, greedy)
        laws = likely_tokens(
            self._logits, self._chosen.to(self._logits.device), self._keep.num_laws
        )
        for row, text in enumerate(self._rows):
            if text in self.alive:
                self._answers[text].append(int(self._chosen[row]))
                self._laws[text].append(laws.rows(slice(row, row + 1)))

    def finish(self, stop_ids: frozenset[int], *, last: bool) -> None:
        """Note the texts that ended."""
        self.alive = {i for i in self.alive if not last and self._answers[i][-1] not in stop_ids}

    def read(self) -> None:
        """Let the target read the tokens just drawn."""
        positions = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat((self._mask, torch.ones_like(positions)), dim=1)
        features = self._forward(self._chosen[:, None], positions)
        for row, text in enumerate(self._rows):
            if text in self.alive:
                self._features[text].append(features[row].clone())

    def drop_finished(self) -> None:
        """Take finished rows out of the batch where they are many."""
        kept = [row for row, text in enumerate(self._rows) if text in self.alive]
        if len(kept) > 0.8 * len(self._rows):
            return
        index = torch.tensor(kept)
        self._cache.batch_select_indices(index.to(self._target.device))
        self._rows = [self._rows[row] for row in kept]
        self._mask, self._temperatures = self._mask[index], self._temperatures[index]
        self._logits = self._logits[index.to(self._logits.device)]

    def texts(self) -> list[Text]:
        """Return all texts, each as far as it came."""
        parts = zip(self._prompts, self._answers, self._features, self._laws, strict=True)
        return [
            assembled(
                torch.tensor([*prompt, *answered], dtype=torch.int32),
                len(prompt),
                torch.cat(features),
                Laws(
                    torch.cat([law.ids for law in laws]),
                    torch.cat([law.logprobs for law in laws]),
                ),
            )
            for prompt, answered, features, laws in parts
        ]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Read ids [n, T] on; keep the last row's logits; return features [n, T, K*H]."""
        device = self._target.device
        output = self._target(
            ids.to(device),
            attention_mask=self._mask.to(device),
            position_ids=positions.to(device),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=self._keep.hidden_states,
            logits_to_keep=1,
        )
        self._logits = output.logits[:, -1]
        return captured_features(output.hidden_states, self._keep, tuple(ids.shape)).cpu()
