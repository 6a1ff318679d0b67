# SPDX-License-Identifier: Apache-2.0
"""What a training run can be told, as frozen objects read once from YAML and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_dflash.strict import plain

__all__ = [
    "NEW_DRAFT",
    "DataSettings",
    "DraftSettings",
    "LoopSettings",
    "Settings",
    "SettingsError",
]

_PUBLISHED_DECAYS = {16: 7.0, 10: 5.0, 8: 4.0}
# What a new draft has where the settings leave it open, and an earlier draft decides else.
NEW_DRAFT: Mapping[str, Any] = {
    "num_layers": 5,
    "block_size": 16,
    "sliding_layers": (),
    "sliding_window": None,
    "selector_rank": 0,
    "selector_top_k": 16,
    "conv_kernel_size": 0,
    "conv_group_size": 16,
}


class SettingsError(ValueError):
    """A setting that is unknown, of another type, or out of range; the text names it."""


@dataclass(frozen=True)
class DraftSettings:
    """The shape of the draft; what is left open, None, is settled once an earlier draft is read.

    Raises:
        SettingsError: a value out of range, or one that contradicts another.

    Attributes:
        num_layers: Decoder layers; 5 in a new draft.
        block_size: B, the anchor included; 16 in a new draft.
        num_features: Target layers to capture, spread evenly; a new draft has `num_layers`.
        target_layer_ids: The captured layers themselves, in place of `num_features`.
        intermediate_size: Width of the MLP; the target's in a new draft.
        mask_token_id: Token that stands for "not known yet"; a reserved one in a new draft.
        sliding_window: Window of `sliding_layers` in tokens.
        sliding_layers: Draft layers that have the window; none in a new draft.
        selector_rank: Width of DFlash2's candidate selector; 0, as in a new draft, has none.
        selector_top_k: Candidates of a row that it chooses from; 16 in a new draft.
        conv_kernel_size: Taps of DFlash2's convolutions around every sublayer; 0, as in a new
            draft, has none.
        conv_group_size: Channels that share a kernel's moving part; 16 in a new draft.
        init_from_target_layers: Start from evenly spread target layers, not from noise.
        init_from_draft: Folder or Hub id of a draft to go on from, which decides what is left
            open. Block size, windows and `selector_top_k` may differ from its own; layers and
            parts of DFlash2 that it lacks begin without effect.
    """

    num_layers: int | None = None
    block_size: int | None = None
    num_features: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    mask_token_id: int | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    init_from_target_layers: bool = False
    init_from_draft: str | None = None

    def __post_init__(self) -> None:
        both = self.init_from_target_layers and self.init_from_draft is not None
        _require(
            not both, "draft.init_from_draft", self.init_from_draft, "no other start beside it"
        )
        for name, least, most in (("num_layers", 1, 64), ("block_size", 2, 64)):
            value = getattr(self, name)
            valid = value is None or least <= value <= most
            _require(valid, f"draft.{name}", value, f"{least} to {most}")
        for name in ("num_features", "intermediate_size", "selector_top_k", "conv_group_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"draft.{name}", value, "1 or more")
        for name in ("selector_rank", "conv_kernel_size"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"draft.{name}", value, "0 or more")
        self._check_windows()

    def decided(self, name: str) -> Any:
        """Return a setting, or a new draft's; None where an earlier draft will decide."""
        value = getattr(self, name)
        is_new = self.init_from_draft is None
        return NEW_DRAFT.get(name) if value is None and is_new else value

    def _check_windows(self) -> None:
        layers, window = self.decided("sliding_layers"), self.sliding_window
        num_layers, block_size = self.decided("num_layers"), self.decided("block_size")
        if None in (layers, num_layers, block_size) or (not layers and window is None):
            return
        valid = bool(layers) and (window or 0) >= block_size
        _require(
            valid and all(0 <= i < num_layers for i in layers),
            "draft.sliding_layers",
            layers,
            "layer numbers, and draft.sliding_window of at least a block",
        )


@dataclass(frozen=True)
class DataSettings:
    """Which texts of the target the draft learns from.

    Attributes:
        prompts: Sources, `FILE`, `FILE:N` or `auto:N`; `auto` lets the target make them up.
        more_texts: Folders of texts that earlier runs made, read beside those of this run.
        auto_starts: Beginnings that the target completes to a prompt, in turn.
        max_prompt_tokens: Longer prompts are left out.
        max_new_tokens: Where an answer is cut.
        greedy_share: Share of answers decoded at temperature 0.
        temperature: Of the other answers.
        top_k: Tokens that sampling chooses from.
        num_laws: Most likely next tokens stored at each position for soft labels; 0 stores none.
        system_prompt: Put before each prompt, or None.
        thinking: Passed to the chat template as `enable_thinking`.
        held_out_share: Share of prompts kept for measuring, chosen by the prompt's hash.
        batch_size: Texts decoded together.
        texts_per_shard: Texts of one file, the unit of resuming.
        seed: Of sampling.
    """

    prompts: tuple[str, ...] = ("auto:2000",)
    more_texts: tuple[str, ...] = ()
    auto_starts: tuple[str, ...] = ("",)
    max_prompt_tokens: int = 512
    max_new_tokens: int = 512
    greedy_share: float = 0.6
    temperature: float = 0.7
    top_k: int = 50
    num_laws: int = 16
    system_prompt: str | None = None
    thinking: bool = False
    held_out_share: float = 0.03
    batch_size: int = 64
    texts_per_shard: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_new_tokens", "top_k", "batch_size"):
            _require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "1 or more")
        _require(bool(self.prompts), "data.prompts", self.prompts, "at least one source")
        _require(bool(self.auto_starts), "data.auto_starts", self.auto_starts, "one or more texts")
        _require(self.max_new_tokens >= 3, "data.max_new_tokens", self.max_new_tokens, "3 or more")
        _require(self.texts_per_shard >= 1, "data.texts_per_shard", self.texts_per_shard, "1 up")
        _require(0 <= self.greedy_share <= 1, "data.greedy_share", self.greedy_share, "0 to 1")
        _require(0 < self.temperature < 10, "data.temperature", self.temperature, "above 0")
        _require(
            0 < self.held_out_share < 1, "data.held_out_share", self.held_out_share, "0 to 1, open"
        )
        # The token that was drawn must be among those whose law is stored.
        valid = self.num_laws == 0 or self.num_laws >= 2
        _require(valid, "data.num_laws", self.num_laws, "0, or 2 or more")


@dataclass(frozen=True)
class LoopSettings:
    """How the draft is trained.

    Attributes:
        steps: Optimizer steps.
        texts_per_batch: Texts of one forward; they share the step's context projections.
        anchors_per_text: Blocks drawn from each text.
        accumulate: Forwards of one optimizer step.
        optimizer: `adamw`, or `muon` for the matrices, with AdamW for the norms.
        learning_rate: Its peak.
        warmup_share: Share of the steps in which it rises; it then falls to 0 as a cosine.
        weight_decay: The optimizer's.
        clip_norm: Largest norm of the gradient.
        position_weights: `decay` for weights fixed by a row's place in its block, or `dpace` for
            those that follow from the draft's own confidence in the rows of the block.
        position_decay: g of the weights exp(-(k-1)/g); None takes 7 / 5 / 4 at B = 16 / 10 / 8.
        dpace_alpha: How far `dpace` moves a confidence towards 1; at 1 the weights are linear.
        selector_weight: Of the candidate selector's loss beside the rows' own.
        soft_share: Share of the target's stored distribution in the labels, the rest is its token.
        softmax_vocabulary: `full`, or `seen` for the tokens that occur in the texts and a sample
            of the others that stands for all of them: a fraction of the head's cost.
        unseen_samples: Size of that sample, drawn anew for each batch.
        short_block_size: B of the short blocks, with as many more anchors; 0 has none.
        short_block_share: Share of the steps with short blocks.
        checkpoint_every: Steps between resumable states.
        eval_every: Steps between measurements.
        eval_texts: Held-out texts measured, and at most 16 learnt ones.
        dtype: Of the matrix products; masters and optimizer are float32.
        seed: Of initial weights, order and anchors.
    """

    steps: int = 2000
    texts_per_batch: int = 8
    anchors_per_text: int = 24
    accumulate: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    warmup_share: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    position_weights: Literal["decay", "dpace"] = "decay"
    position_decay: float | None = None
    dpace_alpha: float = 0.5
    selector_weight: float = 1.0
    soft_share: float = 0.0
    softmax_vocabulary: Literal["full", "seen"] = "full"
    unseen_samples: int = 1024
    short_block_size: int = 0
    short_block_share: float = 0.0
    checkpoint_every: int = 200
    eval_every: int = 200
    eval_texts: int = 32
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        counts = "steps texts_per_batch anchors_per_text accumulate unseen_samples checkpoint_every"
        for name in [*counts.split(), "eval_every", "eval_texts"]:
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "1 or more")
        for name in ("learning_rate", "clip_norm", "selector_weight"):
            _require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "above 0")
        valid = self.weight_decay >= 0
        _require(valid, "train.weight_decay", self.weight_decay, "0 or more")
        valid = -(2**63) <= self.seed < 2**64  # what torch takes
        _require(valid, "train.seed", self.seed, "a number of 64 bits")
        for name in ("warmup_share", "soft_share", "short_block_share"):
            _require(0 <= getattr(self, name) <= 1, f"train.{name}", getattr(self, name), "0 to 1")
        decay = self.position_decay
        _require(decay is None or decay > 0, "train.position_decay", decay, "above 0")
        valid = decay is None or self.position_weights == "decay"
        _require(valid, "train.position_decay", decay, "none with train.position_weights: dpace")
        alpha = self.dpace_alpha
        # At 0 the rows of a new draft have next to no weight.
        _require(0 < alpha <= 1, "train.dpace_alpha", alpha, "above 0, at most 1")
        short = self.short_block_size
        _require(short == 0 or short >= 2, "train.short_block_size", short, "0, or 2 or more")
        valid = short > 0 or self.short_block_share == 0
        _require(valid, "train.short_block_share", self.short_block_share, "0 without a size")

    def decay_of(self, block_size: int) -> float:
        """Return g of the position weights for a block size; 0.45 B where none was published."""
        return self.position_decay or _PUBLISHED_DECAYS.get(block_size, 0.45 * block_size)


@dataclass(frozen=True)
class Settings:
    """A whole run.

    Attributes:
        draft: Its shape.
        data: Its texts.
        train: Its loop.
    """

    draft: DraftSettings = field(default_factory=DraftSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        has_laws = self.data.num_laws > 0 or self.train.soft_share == 0
        _require(has_laws, "data.num_laws", 0, "2 or more, for train.soft_share needs them")
        short, block_size = self.train.short_block_size, self.draft.decided("block_size")
        fits = block_size is None or short < block_size
        _require(fits, "train.short_block_size", short, f"less than {block_size}")

    def as_dict(self) -> dict[str, Any]:
        """Return what `settings_from_dict` takes, every value stated."""
        return plain(self)


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise SettingsError(f"{name} is {value!r}, expected {allowed}")
