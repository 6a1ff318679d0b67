# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch: blocks through the draft, the target's head, cross-entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from sglang_dflash.training.anchors import block_labels
from sglang_dflash.training.loss import RowLabels, RowLosses, label_cross_entropy
from sglang_dflash.training.row_weights import decay_weights, dpace_weights
from sglang_dflash.training.selection import selector_cross_entropy

if TYPE_CHECKING:
    from sglang_dflash.training.batches import Batch
    from sglang_dflash.training.model import BlockDraft
    from sglang_dflash.training.settings import LoopSettings

__all__ = ["BlockLoss", "BlockResult"]


class BlockResult(NamedTuple):
    """What a batch gave.

    Attributes:
        loss: Scalar.
        correct: [B-1] int64, rows whose most likely token is the text's, by position.
        counted: [B-1] int64, rows with a label, by position.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    counted: torch.Tensor


class BlockLoss(nn.Module):
    """The draft between the target's frozen embedding and head.

    Attributes:
        draft: What is trained; nothing else has gradients.
    """

    def __init__(
        self,
        draft: BlockDraft,
        embedding: torch.Tensor,
        head: torch.Tensor,
        settings: LoopSettings,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """Take the target's weights.

        Args:
            draft: The draft, float32.
            embedding: [V, H], the target's.
            head: [V, H], the target's.
            settings: Weights, labels and types.
            vocabulary: [V'] int64, the tokens that the softmax of the loss is over; None is all.
        """
        super().__init__()
        self.draft = draft
        self._settings = settings
        self._autocast = settings.dtype == "bfloat16"
        dtype = torch.bfloat16 if self._autocast else next(draft.parameters()).dtype
        # Plain attributes: frozen, on the draft's device, and no part of a state.
        self._embedding = embedding.detach()
        self._head = head.detach().to(dtype)
        self._places: torch.Tensor | None = None
        self._tokens = torch.arange(len(head), device=head.device)  # of each of the head's rows
        if vocabulary is not None:
            self._tokens = vocabulary
            self._places = torch.full((len(head),), -1, dtype=torch.int64, device=head.device)
            self._places[vocabulary] = torch.arange(len(vocabulary), device=head.device)
            self._unseen_head = self._head[self._places < 0]
            self._head = self._head[vocabulary].contiguous()

    def forward(self, batch: Batch) -> BlockResult:
        """Return loss and hits of a batch."""
        hidden = self.hidden_states(batch)  # [n, A, B, H]
        places, known = block_labels(batch.anchors, batch.lengths, batch.block_size)
        text, block, row = where = known.nonzero(as_tuple=True)  # [M] each
        tokens = batch.tokens[text, places[text, block, row]]
        labels = self._labels(batch, text, places[text, block, row], tokens)
        head, bias = self._head_and_bias(batch.uniforms)
        rows_hidden = hidden[text, block, row + 1]  # [M, H]
        if self.draft.candidate_selector is None:
            found = label_cross_entropy(rows_hidden, head, labels, bias)
        else:
            before = batch.tokens[text, places[text, block, row] - 1]
            found = self._selected(rows_hidden, before, head, labels, bias)
        hits = (found.best[:, 0] == labels.tokens).to(torch.int64)
        rows = batch.block_size - 1
        return BlockResult(
            self._weighted(found, known, where),
            torch.bincount(row, weights=hits.double(), minlength=rows).to(torch.int64),
            torch.bincount(row, minlength=rows),
        )

    def _selected(
        self,
        hidden: torch.Tensor,
        predecessors: torch.Tensor,
        head: torch.Tensor,
        labels: RowLabels,
        bias: torch.Tensor | None,
    ) -> RowLosses:
        """Return the losses of rows with a candidate selector: their own and its.

        Args:
            hidden: [M, H].
            predecessors: [M] int64, the text's tokens before the rows'.
            head: [V', H], seen tokens first.
            labels: What the rows should say.
            bias: [V'] or None, added to the logits.
        """
        config, selector = self.draft.config, self.draft.candidate_selector
        assert selector is not None, "a plain draft has none"
        seen = len(self._head)
        own = label_cross_entropy(
            hidden, head, labels, bias, num_best=min(config.selector_top_k, seen), best_below=seen
        )
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self._autocast):
            parts = (self._head, self._tokens)
            chosen = selector_cross_entropy(selector, hidden, predecessors, own.best, parts, labels)
        losses = own.losses + self._settings.selector_weight * chosen.losses
        return chosen._replace(losses=losses)

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """Return the draft's final hidden states of a batch's blocks, [n, A, B, H]."""
        mask_token_id = self.draft.config.mask_token_id
        assert mask_token_id is not None, "a new draft's config states it"
        masks = (*batch.anchors.shape, batch.block_size)
        ids = torch.full(masks, mask_token_id, device=batch.anchors.device)
        ids[..., 0] = batch.tokens.gather(1, batch.anchors.clamp(min=0))
        wide = next(self.draft.parameters()).dtype
        # The residual stream stays wide; products are narrow under autocast.
        embeddings = nn.functional.embedding(ids, self._embedding).to(wide)
        device = batch.anchors.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._autocast):
            features = batch.features if self._autocast else batch.features.to(wide)
            return self.draft.forward_blocks(embeddings, batch.anchors, features)

    def _weighted(
        self, found: RowLosses, known: torch.Tensor, where: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Return the loss of a batch from those of its rows, a scalar.

        Processes and accumulated batches are averaged afterwards, each with its own divisor: a
        batch counts as one, however many of its blocks or rows have labels.

        Args:
            found: Of the M rows with a label.
            known: [n, A, B-1] bool, which rows these are.
            where: The same as M indices by dimension, [M] int64 each.
        """
        row = where[2]
        if self._settings.position_weights == "decay":
            block_size = known.shape[-1] + 1
            decay = self._settings.decay_of(block_size)
            weights = decay_weights(block_size, decay).to(row.device)[row]
            return (found.losses * weights).sum() / weights.sum()
        confidences = found.log_probs.new_zeros(known.shape)
        confidences[where] = found.log_probs.exp()
        weights = dpace_weights(confidences, known, self._settings.dpace_alpha)[where]
        # By the blocks with a label, not by the weights: that these grow with what is accepted is
        # part of the gradient.
        return (found.losses * weights).sum() / (row == 0).sum()

    def _head_and_bias(self, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's rows that the softmax is over, and what to add to their logits.

        A sample of S of N unseen tokens stands for all of them where each counts N / S times: the
        sum of exponentials is then right on average. Without it nothing pushes unseen tokens
        down, and a draft whose loss is low proposes them.

        Args:
            uniforms: [S] float32 in [0, 1).
        """
        if self._places is None or not len(uniforms) or not len(self._unseen_head):
            return self._head, None
        number = len(self._unseen_head)
        sampled = (uniforms * number).long().clamp(max=number - 1)
        bias = self._head.new_zeros(len(self._head) + len(sampled))
        bias[len(self._head) :] = math.log(number / len(sampled))
        return torch.cat((self._head, self._unseen_head[sampled])), bias

    def _labels(
        self, batch: Batch, text: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> RowLabels:
        """Return the laws of rows whose tokens [M] stand at positions [M] of texts [M]."""
        share, own = self._settings.soft_share, self._place_of(tokens)
        if share == 0 or batch.law_ids.shape[-1] == 0:
            ids = own[:, None]
            return RowLabels(own, ids, torch.ones_like(ids, dtype=torch.float32))
        # The law of a token is what the target said at the one before.
        ids = batch.law_ids[text, positions - 1]
        probs = batch.law_logprobs[text, positions - 1].exp()
        places = self._place_of(ids)
        probs = probs.masked_fill(places < 0, 0.0)
        probs = share * probs / probs.sum(-1, keepdim=True).clamp(min=1e-30)
        probs = probs + (1 - share) * (ids == tokens[:, None])
        return RowLabels(own, places.clamp(min=0), probs)

    def _place_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the head's rows of tokens; -1 where the softmax leaves one out."""
        return tokens if self._places is None else self._places[tokens]
