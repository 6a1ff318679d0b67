# SPDX-License-Identifier: Apache-2.0
"""Tiny targets with drafts of middling acceptance, made on the spot and the same for a seed.

A random target is a chaotic map that no draft follows, so these are random but for one thing:
`lm_head` favours a fixed successor of the token just read, strongly enough to be followed about
five times in six, while attention and MLPs decide when it is left. The text is printable ASCII,
one token a character, and does not end on its own. The draft is then trained for a few seconds on
texts of the target; in half of its training blocks the anchor is hidden, so that it learns to read
the injected context too and a fault there costs acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.hf import DraftContext, HFDraft, context_features

__all__ = ["MASK_TOKEN_ID", "PRINTABLE", "Pair", "make_pair", "random_prompt"]

PRINTABLE = range(32, 127)  # token id = byte value
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
EOS_TOKEN_ID, MASK_TOKEN_ID = 256 + _SPECIALS.index("<|im_end|>"), 256 + len(_SPECIALS) - 1
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
_DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 16,
    "selector_top_k": 4,
    "output_multiplier": 0.9,
    "final_logit_softcapping": 40.0,
}
_PROMPT_TOKENS, _TEXT_TOKENS = 8, 72
_NUM_TEXTS, _BATCH, _ANCHORS_A_STEP, _STEPS = 192, 24, 3, 180


@dataclass(frozen=True)
class Pair:
    """A target and its draft on disk.

    Attributes:
        target: Folder of the target, with its tokenizer.
        draft: Folder of the draft.
        block_size: B the draft was trained at.
    """

    target: Path
    draft: Path
    block_size: int


def make_pair(
    folder: Path,
    family: Literal["llama", "qwen3"],
    *,
    num_layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 320,
    draft_layers: int = 2,
    block_size: int = 8,
    seed: int = 0,
    sliding_window: int | None = None,
    dflash2: bool = False,
) -> Pair:
    """Write a target and a trained draft, float32, and return where they lie.

    Args:
        folder: Where to put `target/` and `draft/`.
        family: The target's architecture.
        num_layers: Decoder layers of the target.
        hidden: H of both.
        heads: Query heads of both.
        kv_heads: KV heads of both.
        head_dim: Channels of a head; 64 is what every attention backend takes.
        vocab: Rows of the embedding, at least 260; those beyond the tokenizer stay unused.
        draft_layers: Decoder layers of the draft.
        block_size: B to train the draft at.
        seed: Of everything.
        sliding_window: Window of the draft's last layer, whose file then also holds copies of the
            target's embedding and head; None makes all layers full.
        dflash2: Whether the draft has convolutions and a candidate selector.
    """
    pair = Pair(folder / "target", folder / "draft", block_size)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
    }
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = _random_target(family, sizes, num_layers)
        config = _draft_config(sizes, num_layers, draft_layers, block_size, sliding_window)
        if dflash2:
            config |= {"architectures": ["DFlash2DraftModel"]}
            config["dflash_config"] |= _DFLASH2
        draft = _trained_draft(config, target)
    target.save_pretrained(pair.target)
    _tokenizer().save_pretrained(pair.target)
    pair.draft.mkdir(parents=True)
    (pair.draft / "config.json").write_text(json.dumps(config, indent=1))
    weights = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
    if sliding_window is not None:  # so that the suite has a draft with what some trainers save
        borrowed = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.lm_head}
        weights |= {f"{name}.weight": part.weight.clone() for name, part in borrowed.items()}
    save_file(weights, pair.draft / "model.safetensors")
    return pair


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums come in one order, so that a seed gives the same weights; and nobody is crowded out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def random_prompt(length: int, generator: torch.Generator) -> torch.Tensor:
    """Return [1, length] int64, printable tokens drawn evenly."""
    return torch.randint(
        PRINTABLE.start, PRINTABLE.stop, (1, length), generator=generator, dtype=torch.int64
    )


def _random_target(family: str, sizes: dict[str, int], num_layers: int) -> PreTrainedModel:
    """Return a target that follows a fixed chain of tokens most of the time."""
    config_class, model_class = _FAMILIES[family]
    config = config_class(
        **sizes,
        num_hidden_layers=num_layers,
        tie_word_embeddings=False,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=None,
        pad_token_id=256,
    )
    target = model_class(config).eval().requires_grad_(False)
    for name, weight in target.named_parameters():
        if weight.dim() == 2:
            sharpness = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            weight.normal_(0, sharpness / weight.shape[1] ** 0.5)
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    embedding.normal_()
    # One channel is the same for all tokens; by it the unused rows of the head get low logits.
    embedding[:, 0] = 3.0
    head.zero_()
    head[:, 0] = -3.0
    chain = torch.tensor(PRINTABLE)[torch.randperm(len(PRINTABLE))]
    head[chain.roll(-1)] = 0.25 * embedding[chain] + 0.03 * torch.randn(len(chain), head.shape[1])
    return target


def _draft_config(
    sizes: dict[str, int],
    num_layers: int,
    draft_layers: int,
    block_size: int,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Return the draft's config.json."""
    last = "full_attention" if sliding_window is None else "sliding_attention"
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **sizes,
        "num_hidden_layers": draft_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * (draft_layers - 1) + [last],
        "use_sliding_window": sliding_window is not None,
        "sliding_window": sliding_window,
        "max_window_layers": draft_layers,
        "dtype": "float32",
        "block_size": block_size,
        "num_target_layers": num_layers,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN_ID,
            "target_layer_ids": sorted({0, (num_layers - 1) // 2, num_layers - 2}),
        },
    }


def _trained_draft(config: dict[str, Any], target: PreTrainedModel) -> HFDraft:
    """Return a draft trained on the target's own texts, greedy and sampled."""
    draft = HFDraft(DraftConfig.from_dict(config, source="tests/pairs.py"))
    if draft.candidate_selector is not None:  # with two codebooks at 0 neither would leave it
        torch.nn.init.normal_(draft.candidate_selector.predecessor_codebook)
    texts, features = _texts(target, draft.config.target_layer_ids)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, total_steps=_STEPS, pct_start=0.1
    )
    for _ in range(_STEPS):
        rows = torch.randperm(len(texts))[:_BATCH]
        loss = _loss(draft, target, texts[rows], features[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return draft


def _texts(
    target: PreTrainedModel, target_layer_ids: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts [n, T] and their context features [n, T, K*H]."""
    prompts = torch.randint(PRINTABLE.start, PRINTABLE.stop, (_NUM_TEXTS, _PROMPT_TOKENS))
    halves = [
        target.generate(
            half,
            attention_mask=torch.ones_like(half),
            max_new_tokens=_TEXT_TOKENS - _PROMPT_TOKENS,
            min_new_tokens=_TEXT_TOKENS - _PROMPT_TOKENS,
            do_sample=sample,
            top_k=0 if sample else None,
        )
        for half, sample in zip(prompts.chunk(2), (False, True), strict=True)
    ]
    texts = torch.cat(halves)
    states = target(texts, output_hidden_states=True).hidden_states
    return texts, context_features(states, target_layer_ids)


def _loss(
    draft: HFDraft, target: PreTrainedModel, texts: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Return the cross-entropy of a few random anchors' blocks, early positions weighing more."""
    block = draft.config.block_size
    weights = torch.exp(-torch.arange(block - 1) / 4.0)
    anchors = torch.randint(_PROMPT_TOKENS, _TEXT_TOKENS - block, (_ANCHORS_A_STEP,)).tolist()
    whole = draft.inject(features[:, : max(anchors)], torch.arange(max(anchors)))
    losses = []
    for anchor in anchors:
        ids = torch.full((len(texts), block), MASK_TOKEN_ID)
        shown = torch.rand(len(texts)) < 0.5
        ids[shown, 0] = texts[shown, anchor]
        context = DraftContext(
            [keys[:, :, :anchor] for keys in whole.keys],
            [values[:, :, :anchor] for values in whole.values],
            whole.positions[:anchor],
        )
        positions = torch.arange(anchor, anchor + block)
        hidden = draft(target.get_input_embeddings()(ids), positions, context)
        logits = target.lm_head(hidden[:, 1:])
        labels = texts[:, anchor + 1 : anchor + block]
        each = _cross_entropy(logits, labels)
        if draft.candidate_selector is not None:  # the rows' own logits name its candidates
            selected = _selected(
                draft, hidden[:, 1:], logits, texts[:, anchor : anchor + block - 1]
            )
            each = each + _cross_entropy(selected, labels)
        losses.append((each * weights).mean() / weights.mean())
    return torch.stack(losses).mean()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return that of each row, [n, B-1]."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape)


def _selected(
    draft: HFDraft, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """Return logits [n, B-1, V] as the selector has them where it comes from the text's tokens."""
    cap = draft.config.final_logit_softcapping
    own = cap * torch.tanh(logits * draft.config.output_multiplier / cap)
    tokens = torch.arange(logits.shape[2])
    return own + draft.candidate_selector.pair_scores(hidden, before[..., None], tokens).squeeze(2)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte and four special ones."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + i) for i in range(256))  # byte-level BPE's letters for the other bytes
    letters = {b: chr(b) if b in visible else next(others) for b in range(256)}
    tokenizer = Tokenizer(models.BPE({letter: b for b, letter in letters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
