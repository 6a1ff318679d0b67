# SPDX-License-Identifier: Apache-2.0
"""What a block sees in training is what it sees in the engine, key by key, in float64.

The engine's side is its own draft model and its own attention back end, both made float64: the
injection, the write of a block's rows to the pool, the plan over a page table and the windows are
the code that serves. Only the pool is replaced, by one of float64 whose slots hold NaN until they
are written. It stands as a decode step leaves it: the features of all tokens before the anchor are
injected, and those of a block's length after it too, for a verify step injects refused rows.

* **Values**: all rows of all blocks agree to rounding; sums run in another order.
* **Sets**, of the reference's decoding too: in one layer, each feature and each row is changed in
  turn. The rows whose output then differs in any bit are the rows that see it. They are the same on
  all sides, without a tolerance, and are those that the rule says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from corpora import config_of, random_draft
from masks import ANCHORS, BLOCK, CONFIGS, LENGTH, MUTANTS, TOLERANCE, by_decoding, inputs

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel

import sglang_dflash.draft.model
import sglang_dflash.training.model
from sglang_dflash.cpu.attention import CpuAttentionBackend
from sglang_dflash.cpu.operators import OPERATORS
from sglang_dflash.draft.model import DFlashDraftModel
from sglang_dflash.training.model import BlockDraft

# Fewer blocks where every input is changed in turn: neighbours, a gap, and a text's end.
FEW_ANCHORS = torch.tensor([[1, 8, 9, 29], [2, 11, -1, -1]])
ONE_LAYER = {"num_hidden_layers": 1}
WINDOWED = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": WINDOWED | {"sliding_window": 7},
    "window, bidirectional": WINDOWED | {"sliding_window": 7, "is_causal": False},
    "window of a block, bidirectional": WINDOWED | {"sliding_window": BLOCK, "is_causal": False},
}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training's norms and rotations compute in float32; here they shall hide nothing."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(sglang_dflash.training.model, "_GROUP_ROWS", 15)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """SGLang's layers ask how they are split."""
    with get_parallel().override(tp_size=1, tp_rank=0, tp_group=None):
        yield


class Pool:
    """As much of SGLang's K/V pool as is used; NaN where nothing was written."""

    def __init__(self, draft: BlockDraft, num_slots: int) -> None:
        config = draft.config
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self._keys = torch.full(shape, float("nan"), dtype=torch.float64)
        self._values = self._keys.clone()

    def set_kv_buffer(
        self, layer: Any, write: Any, keys: torch.Tensor, values: torch.Tensor, *_: None
    ) -> None:
        self._keys[layer.layer_id, write.loc] = keys
        self._values[layer.layer_id, write.loc] = values

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._values[layer_id]


class EngineDraft:
    """The engine's draft with a trained draft's weights, float64."""

    def __init__(self, draft: BlockDraft, monkeypatch: pytest.MonkeyPatch) -> None:
        self._draft = draft
        monkeypatch.setattr(sglang_dflash.draft.model, "served_draft_config", lambda: draft.config)
        model = DFlashDraftModel(config=None).double()
        model.load_weights(draft.state_dict().items())
        operators = dict(OPERATORS)
        for layer in model.layers:
            # SGLang's table is float32, and shared by all layers of one shape in a process.
            attention = layer.self_attn
            attention.rotary_emb = copy.deepcopy(attention.rotary_emb)
            positions = torch.arange(LENGTH + BLOCK)
            attention.rotary_emb.cos_sin_cache = torch.cat(draft._tables(positions), dim=-1)
        for module in model.modules():
            if type(module) in operators:  # which a server gets from its platform
                module.forward = MethodType(operators[type(module)], module)
        self._model = model

    @torch.no_grad()
    def states(
        self, features: torch.Tensor, embeddings: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Return all blocks' final states, [m, B, H], each block a request of one batch.

        Args:
            features: [2, T, K*H].
            embeddings: [2, A, B, H].
            anchors: [2, A] int64, padded with -1; m of them are none.
        """
        text, number = (anchors >= 0).nonzero(as_tuple=True)
        starts = anchors[text, number]
        table, requests, pool = self._shuffled_pages(len(starts))
        for first, last in ((0 * starts, starts // 2), (starts // 2, starts + BLOCK)):
            owner, position = _spans(first, last.clamp(max=LENGTH))
            slots = table[requests[owner], position].long()
            self._model.inject(features[text[owner], position], position, slots, pool)
        owner, position = _spans(starts, starts + BLOCK)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(starts),
            req_pool_indices=requests,
            seq_lens=starts,
            out_cache_loc=table[requests[owner], position].long(),
            out_cache_loc_is_physical=True,
            spec_info=SimpleNamespace(ragged_verify_layout=None, draft_token_num=BLOCK),
        )
        backend = CpuAttentionBackend(_runner(table, pool))
        backend.init_forward_metadata(batch)
        rows = embeddings[text, number].flatten(0, 1)
        self._model.borrow_embedding(lambda ids: rows[ids])
        with forward_context(ForwardContext(backend)):
            output = self._model(torch.arange(len(rows)), position, batch)
        return output.hidden_states.view(len(starts), BLOCK, -1)

    def _shuffled_pages(self, count: int) -> tuple[torch.Tensor, torch.Tensor, Pool]:
        """Return a page table, the requests' rows in it, and an empty pool."""
        generator = torch.Generator().manual_seed(3)
        width = LENGTH + BLOCK
        table = torch.randperm((count + 2) * width, generator=generator).view(-1, width).int()
        requests = torch.randperm(count + 2, generator=generator)[:count]
        return table, requests, Pool(self._draft, table.numel())


def _runner(table: torch.Tensor, pool: Pool) -> Any:
    """Return as much of SGLang's model runner as the back end reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=False),
        use_mla_backend=False,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
    )


def _spans(first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return owner and position, [sum] int64 each, of the positions first..last-1 of each."""
    lengths = last - first
    owner = torch.arange(len(first)).repeat_interleave(lengths)
    inside = torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]
    return owner, first[owner] + inside


@torch.no_grad()
def in_training(
    draft: BlockDraft, features: torch.Tensor, embeddings: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Return all blocks' final states, [m, B, H], as a training step makes them."""
    return draft.forward_blocks(embeddings, anchors, features)[anchors >= 0]


def greatest_difference(draft: BlockDraft, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest difference of any state; NaN where a row read what none had written."""
    trained = in_training(draft, *inputs(), ANCHORS)
    return float((trained - EngineDraft(draft, monkeypatch).states(*inputs(), ANCHORS)).abs().max())


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_blocks_in_training_equal_the_engines(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = random_draft(config_of(**changes)).double()
    assert greatest_difference(draft, monkeypatch) <= TOLERANCE


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_comparison_sees_a_wrong_mask(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_dflash.training.model, "visible_rows", mutant)
    draft = random_draft(config_of()).double()
    assert greatest_difference(draft, monkeypatch) > 1e-3


def what_is_seen(states: Any) -> torch.Tensor:
    """Return which rows change with which input, [inputs, m, B] bool.

    Args:
        states: Gives all blocks' states [m, B, H] for features, embeddings and anchors.
    """
    features, embeddings = inputs(FEW_ANCHORS)
    before = states(features, embeddings, FEW_ANCHORS)
    assert not before.isnan().any(), "a row read what none had written"
    seen = []
    for changed, places in (
        (features, [(text, position) for text in range(2) for position in range(LENGTH)]),
        (embeddings, _real_rows()),
    ):
        for place in places:
            kept = changed[place].clone()
            changed[place] = 1 - kept
            after = states(features, embeddings, FEW_ANCHORS)
            seen.append((after != before).any(-1))
            changed[place] = kept
    return torch.stack(seen)


def what_the_rule_says(draft: BlockDraft) -> torch.Tensor:
    """Return the same by the rule in words: all before the anchor, and one's own block."""
    causal, window = draft.config.causal[0], draft.config.sliding_windows[0]
    anchors = [(t, int(FEW_ANCHORS[t, b])) for t, b in (FEW_ANCHORS >= 0).nonzero().tolist()]

    def sees(owner: int, row: int, text: int, block: int | None, position: int) -> bool:
        own_text, anchor = anchors[owner]
        of_its_own = position < anchor if block is None else block == owner
        distance = anchor + row - position
        in_window = window is None or distance < window
        return text == own_text and of_its_own and in_window and (not causal or distance >= 0)

    places = [(text, None, position) for text in range(2) for position in range(LENGTH)]
    places += [(t, i, a + row) for i, (t, a) in enumerate(anchors) for row in range(BLOCK)]
    return torch.tensor(
        [[[sees(o, row, *p) for row in range(BLOCK)] for o in range(len(anchors))] for p in places]
    )


def _real_rows() -> list[tuple[int, int, int]]:
    blocks = (FEW_ANCHORS >= 0).nonzero().tolist()
    return [(text, block, row) for text, block in blocks for row in range(BLOCK)]


def seen_in_training(draft: BlockDraft) -> torch.Tensor:
    return what_is_seen(lambda *arguments: in_training(draft, *arguments))


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_row_sees_the_same_keys_in_training_and_in_the_engine(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = random_draft(config_of(**ONE_LAYER, **changes)).double()
    in_the_engine = what_is_seen(EngineDraft(draft, monkeypatch).states)
    assert torch.equal(seen_in_training(draft), in_the_engine)
    assert torch.equal(in_the_engine, what_the_rule_says(draft))


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_a_row_sees_the_same_keys_in_training_and_in_the_reference(changes: dict[str, Any]) -> None:
    draft = random_draft(config_of(**ONE_LAYER, **changes)).double()

    def states(features: Any, embeddings: Any, anchors: Any) -> torch.Tensor:
        blocks = [
            by_decoding(draft, features[[t]], embeddings[[t], b], int(anchors[t, b]))
            for t, b in (anchors >= 0).nonzero().tolist()
        ]
        return torch.cat(blocks)

    assert torch.equal(seen_in_training(draft), what_is_seen(states))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_mask_shows_in_the_keys_that_are_seen(
    mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_dflash.training.model, "visible_rows", mutant)
    draft = random_draft(config_of(**ONE_LAYER)).double()
    assert not torch.equal(seen_in_training(draft), what_the_rule_says(draft))
