# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of one prompt with a DFlash or DFlash2 draft, on a transformers target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import DynamicCache

from sglang_dflash.draft.checks import check_block_size, check_target
from sglang_dflash.hf.accept import accept_greedy, accept_sampled, draw
from sglang_dflash.hf.select import walk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sglang_dflash.hf.draft import DraftContext, HFDraft

__all__ = ["Generation", "context_features", "spec_generate"]

_DEFAULT_BLOCK_SIZE = 16  # what every engine takes where a checkpoint states none
# Config keys by which a target changes its embeddings or logits outside `lm_head`.
_TRANSFORM_KEYS = (
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "scale_emb",
)


@dataclass(frozen=True)
class Generation:
    """What `spec_generate` returns.

    Attributes:
        tokens: The new tokens, the prompt not among them, a stop token included.
        acceptance_lengths: Tokens that each target step committed, its bonus or recovered token
            included, before anything was cut at the end; the prefill's token is not counted.
        finish_reason: "stop" at a stop token, "length" at `max_new_tokens`.
    """

    tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]
    finish_reason: Literal["stop", "length"]

    @property
    def acceptance_length(self) -> float:
        """Tau: committed tokens per target step; 0.0 where the prefill was all there was."""
        steps = len(self.acceptance_lengths)
        return sum(self.acceptance_lengths) / steps if steps else 0.0


@torch.inference_mode()
def spec_generate(
    draft: HFDraft,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Generation:
    """Return the target's continuation of a prompt, several tokens a target step.

    Greedy text is the target's own greedy text. Sampled text follows the target's law: proposals
    are drawn from the draft's distribution q and kept with probability min(1, p/q), the first
    refused one is replaced by a draw from the normalised max(p - q, 0). A DFlash2 draft draws each
    proposal given the one before it.

    Args:
        draft: From `load_draft`, on the target's device and in its type.
        target: A causal language model whose logits are `lm_head(hidden)`, full attention.
        input_ids: [1, T] int64, the prompt.
        max_new_tokens: Most tokens to return, at least 1.
        temperature: 0 decodes greedily, above 0 samples from softmax(logits / temperature).
        stop_token_ids: Tokens that end the text; None takes the target's generation_config,
            an empty sequence never stops.
        block_size: B, the anchor included; None takes the draft's own.
        generator: Source of randomness, on the target's device; None takes torch's.

    Raises:
        ValueError: an argument is outside what is named above.
        UnsupportedCheckpoint: draft and target do not belong together.

    Example:
        >>> ids = tokenizer("def fib(n):", return_tensors="pt").input_ids
        >>> spec_generate(load_draft("draft"), target, ids, 64).acceptance_length

    Source: Chen et al. 2026 (arXiv 2602.06036); the sampling rule is Leviathan et al. 2023
    (arXiv 2211.17192), Alg. 1.
    """
    if block_size is None:
        block_size = draft.config.block_size or _DEFAULT_BLOCK_SIZE
    _check_arguments(input_ids, max_new_tokens, temperature)
    _check_pair(draft, target, block_size)
    stops = _stop_set(target, stop_token_ids)
    decoder = _Decoder(draft, target, block_size, temperature, generator)
    tokens = [decoder.prefill(input_ids)]
    lengths = []
    while len(tokens) < max_new_tokens and not stops.intersection(tokens):
        committed = decoder.step(tokens[-1])
        lengths.append(len(committed))
        tokens += committed
    tokens = tokens[:max_new_tokens]
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    if end is None:
        return Generation(tuple(tokens), tuple(lengths), "length")
    return Generation(tuple(tokens[: end + 1]), tuple(lengths), "stop")


def context_features(
    hidden_states: Sequence[torch.Tensor], target_layer_ids: Sequence[int]
) -> torch.Tensor:
    """Return the captured layers' outputs side by side.

    Args:
        hidden_states: N + 1 of [n, T, H], as `output_hidden_states=True` gives them: the
            embeddings, then each decoder layer's output.
        target_layer_ids: K layer numbers; id i is the output of decoder layer i.

    Returns:
        [n, T, K*H].
    """
    return torch.cat([hidden_states[i + 1] for i in target_layer_ids], dim=-1)


class _Decoder:
    """The running state of one text: the target's cache and the draft's context."""

    def __init__(
        self,
        draft: HFDraft,
        target: PreTrainedModel,
        block_size: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> None:
        self._draft = draft
        self._target = target
        self._block_size = block_size
        self._temperature = temperature
        self._generator = generator
        self._cache = DynamicCache()
        self._context: DraftContext | None = None

    def prefill(self, input_ids: torch.Tensor) -> int:
        """Run the prompt and return the first token.

        Args:
            input_ids: [1, T] int64.
        """
        logits, features = self._run_target(input_ids)
        self._inject(features)
        last = logits[-1]
        if self._temperature == 0:
            return int(last.argmax())
        return draw(self._probs(last), self._generator)

    def step(self, anchor: int) -> list[int]:
        """Draft a block after the anchor, verify it, and return the tokens it commits."""
        proposals, draft_probs = self._propose(anchor)
        logits, features = self._verify(anchor, proposals)
        if draft_probs is None:
            committed = accept_greedy(proposals, logits)
        else:
            committed = accept_sampled(proposals, self._probs(logits), draft_probs, self._generator)
        # The rows kept are the anchor and the accepted proposals: as many as tokens committed.
        num_refused = self._block_size - len(committed)
        if num_refused:
            self._cache.crop(-num_refused)
        self._inject(features[:, : len(committed)])
        return committed

    def _propose(self, anchor: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return proposals [B-1], and the laws [B-1, V] they were drawn from; None if greedy."""
        hidden = self._draft_rows(anchor)
        logits = self._target.get_output_embeddings()(hidden)
        if self._draft.candidate_selector is not None:
            return walk(self._draft, hidden, logits, anchor, self._temperature, self._generator)
        if self._temperature == 0:
            return logits.argmax(-1), None
        draft_probs = self._probs(logits)
        return torch.multinomial(draft_probs, 1, generator=self._generator)[:, 0], draft_probs

    def _draft_rows(self, anchor: int) -> torch.Tensor:
        """Return the draft's final hidden states of the rows after the anchor, [B-1, H]."""
        assert self._context is not None, "prefill comes first"
        device = self._target.device
        mask_token_id = self._draft.config.mask_token_id
        assert mask_token_id is not None, "check_target refuses a draft without"
        ids = torch.full((1, self._block_size), mask_token_id, device=device)
        ids[0, 0] = anchor
        prefix_len = self._cache.get_seq_length()
        positions = torch.arange(prefix_len, prefix_len + self._block_size, device=device)
        embeddings = self._target.get_input_embeddings()(ids)
        return self._draft(embeddings, positions, self._context)[0, 1:]

    def _verify(self, anchor: int, proposals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's logits [B, V] and features [1, B, K*H] of a block."""
        return self._run_target(torch.cat((proposals.new_tensor([anchor]), proposals))[None])

    def _run_target(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Extend the cache by ids [1, T]; return logits [T, V] and features [1, T, K*H]."""
        output = self._target(
            ids, past_key_values=self._cache, use_cache=True, output_hidden_states=True
        )
        features = context_features(output.hidden_states, self._draft.config.target_layer_ids)
        return output.logits[0], features

    def _inject(self, features: torch.Tensor) -> None:
        """Append committed tokens, whose features [1, T, K*H] are given, to the draft's context."""
        start = 0 if self._context is None else self._context.positions.shape[0]
        positions = torch.arange(start, start + features.shape[1], device=features.device)
        new = self._draft.inject(features, positions)
        self._context = new if self._context is None else self._context.extended(new)

    def _probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return softmax(logits / temperature) in float32."""
        return torch.softmax(logits.float() / self._temperature, dim=-1)


def _check_arguments(input_ids: torch.Tensor, max_new_tokens: int, temperature: float) -> None:
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
        raise ValueError(
            f"input_ids has shape {shape}, expected (1, T): spec_generate decodes one prompt; "
            "call it once per prompt, or serve batches with SGLang"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected 0 (greedy) or a number above")


def _check_pair(draft: HFDraft, target: PreTrainedModel, block_size: int) -> None:
    config = target.config.get_text_config()
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    changed = [key for key in _TRANSFORM_KEYS if getattr(config, key, None) not in (None, 1, 1.0)]
    if changed or type(embedding) is not torch.nn.Embedding or head is None:
        raise ValueError(
            f"target {type(target).__name__}: its embeddings or logits are transformed "
            f"({', '.join(changed) or type(embedding).__name__}), which spec_generate does not "
            "follow; serve this target with SGLang"
        )
    recurrent = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if recurrent:
        raise ValueError(
            f"target {type(target).__name__} has {', '.join(sorted(recurrent))} layers, whose "
            "state cannot be rolled back; serve this target with SGLang"
        )
    weight = draft.fc.weight
    if (weight.device, weight.dtype) != (embedding.weight.device, embedding.weight.dtype):
        raise ValueError(
            f"draft is {weight.dtype} on {weight.device}, target {embedding.weight.dtype} on "
            f"{embedding.weight.device}: load both alike (load_draft(path, dtype, device))"
        )
    check_target(
        draft.config,
        target_hidden_size=config.hidden_size,
        target_vocab_size=embedding.num_embeddings,
        target_num_layers=config.num_hidden_layers,
        tp_size=1,
    )
    check_block_size(block_size, draft.config)
    if draft.borrowed_copies is not None:
        draft.borrowed_copies.check(embedding, head)


def _stop_set(target: PreTrainedModel, stop_token_ids: Sequence[int] | None) -> set[int]:
    if stop_token_ids is not None:
        return set(stop_token_ids)
    stated: Any = None
    if target.generation_config is not None:
        stated = target.generation_config.eos_token_id
    if stated is None:
        return set()
    return {stated} if isinstance(stated, int) else set(stated)
