# SPDX-License-Identifier: Apache-2.0
"""What a new draft is before its first step."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import MASK_TOKEN_ID, Pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.demo.model import bundled_draft
from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.token_map import write_token_map
from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.hf.draft import load_draft
from sglang_dflash.training.checkpoint import known_tokens
from sglang_dflash.training.earlier import read_earlier, settled
from sglang_dflash.training.initial import (
    continued_draft,
    draft_config_json,
    new_draft,
    pick_mask_token,
)
from sglang_dflash.training.settings import DraftSettings, SettingsError
from sglang_dflash.training.settings_file import settings_from_yaml


@pytest.fixture(scope="module")
def target(qwen3_pair: Pair) -> Any:
    return AutoModelForCausalLM.from_pretrained(qwen3_pair.target, dtype=torch.float32)


@pytest.fixture
def tokenizer(qwen3_pair: Pair) -> Any:
    return AutoTokenizer.from_pretrained(qwen3_pair.target)


def test_the_config_is_the_targets_with_the_settings(target: Any, tokenizer: Any) -> None:
    settings = DraftSettings(
        num_layers=2, block_size=8, num_features=1, sliding_window=32, sliding_layers=(1,)
    )
    config = DraftConfig.from_dict(draft_config_json(target, tokenizer, settings), source="test")
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (64, 64, 320)
    assert config.target_layer_ids == (2,)
    assert config.sliding_windows == (None, 32)
    assert config.mask_token_id == MASK_TOKEN_ID
    assert config.rope_theta == target.config.rope_parameters["rope_theta"]


def test_layers_that_cannot_be_captured_are_refused(target: Any, tokenizer: Any) -> None:
    settings = DraftSettings(num_layers=2, target_layer_ids=(0, 3))
    words = r"^the new draft does not fit TARGET:\n- .* cannot be captured"
    with pytest.raises(UnsupportedCheckpoint, match=words):
        draft_config_json(target, tokenizer, settings)


def test_target_layers_are_taken_where_asked(target: Any, tokenizer: Any) -> None:
    settings = DraftSettings(num_layers=1, block_size=4, target_layer_ids=(0, 2))
    config = draft_config_json(target, tokenizer, settings)
    taken = new_draft(config, target, seed=0, from_target_layers=True)
    layer = target.model.layers[2]  # the middle one, as for captured layers
    for name, parameter in taken.layers[0].named_parameters():
        assert torch.equal(parameter, layer.get_parameter(name)), name
    features = torch.randn(3, 128)
    expected = (features[:, :64] + features[:, 64:]) / 2
    torch.testing.assert_close(taken.fc(features), expected)
    noise = new_draft(config, target, seed=0, from_target_layers=False)
    assert not torch.equal(noise.layers[0].mlp.up_proj.weight, layer.mlp.up_proj.weight)


def test_noise_is_the_seeds(target: Any, tokenizer: Any) -> None:
    config = draft_config_json(target, tokenizer, DraftSettings(num_layers=2, block_size=4))
    one, same, other = (
        new_draft(config, target, seed=seed, from_target_layers=False).fc.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_mask_token_is_one_that_texts_never_have(tokenizer: Any) -> None:
    assert pick_mask_token(tokenizer, 320, frozenset()) == MASK_TOKEN_ID
    tokenizer.get_added_vocab = lambda: {"<|im_end|>": 258}  # the template's own
    assert pick_mask_token(tokenizer, 320, frozenset()) == 319
    with pytest.raises(SettingsError, match=r"draft\.mask_token_id"):
        pick_mask_token(tokenizer, len(tokenizer), frozenset())
    tokenizer.get_added_vocab = lambda: {"<|eot|>": 257, "<|reserved|>": 259}
    assert pick_mask_token(tokenizer, 320, frozenset()) == 257
    assert pick_mask_token(tokenizer, 320, frozenset([257])) == 259


def test_a_draft_goes_on_from_an_earlier_one(target: Any, tokenizer: Any, qwen3_pair: Pair) -> None:
    folder = str(qwen3_pair.draft)
    weights = load_draft(qwen3_pair.draft).state_dict()
    for changes in {"block_size": 6}, {"sliding_window": 9, "sliding_layers": (0,)}:
        settings = DraftSettings(init_from_draft=folder, **changes)
        config = draft_config_json(target, tokenizer, settings, read_earlier(settings))
        draft = continued_draft(config, folder, seed=0)
        assert draft.config.block_size == changes.get("block_size", qwen3_pair.block_size)
        assert draft.config.sliding_windows[0] == changes.get("sliding_window")
        for name, weight in weights.items():
            assert torch.equal(draft.state_dict()[name], weight), name
    config = draft_config_json(target, tokenizer, DraftSettings(num_layers=1))
    with pytest.raises(SettingsError, match="another num_layers"):
        continued_draft(config, folder, seed=0)
    config = config | {"num_hidden_layers": 2, "hidden_size": 32}
    with pytest.raises(SettingsError, match=r"another hidden_size .* cannot go on from such"):
        continued_draft(config, folder, seed=0)


_UNLIKE_THE_TARGET = {
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_dim": 16},
    "rope_is_neox_style": False,
    "attention_bias": True,
    "block_size": 6,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
    "is_causal": True,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1]},
}


def write_earlier(pair: Pair, folder: Path, changes: dict[str, Any]) -> str:
    """Write the config.json of the pair's draft with changes; return its folder."""
    stated = json.loads((pair.draft / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(stated))
    return str(folder)


def test_what_is_left_open_is_as_the_earlier_draft_has_it(
    target: Any, tokenizer: Any, qwen3_pair: Pair, tmp_path: Path
) -> None:
    folder = write_earlier(qwen3_pair, tmp_path, _UNLIKE_THE_TARGET)
    settings = DraftSettings(init_from_draft=folder)
    earlier = read_earlier(settings)
    assert earlier is not None
    config = draft_config_json(target, tokenizer, settings, earlier)
    assert DraftConfig.from_dict(config, source=folder) == earlier
    assert settled(settings, earlier).block_size == 6
    assert settled(DraftSettings(), None).block_size == 16
    full = dataclasses.replace(settings, sliding_layers=())
    assert settled(full, earlier).sliding_window is None


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"num_layers": 1}, r"another num_layers \(2, now 1\): leave"),
        ({"mask_token_id": 8}, "another mask_token_id"),
        ({"target_layer_ids": (0, 1)}, "another target_layer_ids"),
        ({"intermediate_size": 32}, "another intermediate_size"),
    ],
)
def test_what_contradicts_the_earlier_draft_is_refused_by_its_config_alone(
    stated: dict[str, Any], message: str, qwen3_pair: Pair, tmp_path: Path
) -> None:
    folder = write_earlier(qwen3_pair, tmp_path, {})
    with pytest.raises(SettingsError, match=message):
        read_earlier(DraftSettings(init_from_draft=folder, **stated))


def test_a_draft_of_another_width_is_refused(
    target: Any, tokenizer: Any, qwen3_pair: Pair, tmp_path: Path
) -> None:
    folder = write_earlier(qwen3_pair, tmp_path, {"hidden_size": 32})
    settings = DraftSettings(init_from_draft=folder)
    with pytest.raises(SettingsError, match="has the hidden size 32, and the target has 64"):
        draft_config_json(target, tokenizer, settings, read_earlier(settings))


def test_the_bundled_recipe_goes_on_from_the_bundled_draft() -> None:
    recipe = files("sglang_dflash.training") / "recipes" / "smollm2-135m.yaml"
    stated = settings_from_yaml(Path(str(recipe))).draft
    settings = dataclasses.replace(stated, init_from_draft=str(bundled_draft()))
    assert settled(settings, read_earlier(settings)) == dataclasses.replace(
        settled(stated, None), init_from_draft=str(bundled_draft())
    )


@pytest.mark.parametrize("kind", ["qwen3_pair", "windowed_pair"])
def test_added_layers_begin_without_effect(
    kind: str, tokenizer: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    pair = request.getfixturevalue(kind)
    settings = DraftSettings(init_from_draft=str(pair.draft), num_layers=4)
    with caplog.at_level("INFO", "sglang_dflash"):
        start = read_earlier(settings)
    assert f"2 layers are added to the 2 of {pair.draft}" in caplog.text
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    config = draft_config_json(target, tokenizer, settings, start)
    draft, before = continued_draft(config, str(pair.draft), seed=0), load_draft(pair.draft)
    assert len(draft.layers) == 4
    context, rows = torch.randn(1, 40, draft.fc.in_features), torch.randn(1, 8, 64)
    earlier, grown = (
        each(rows, torch.arange(40, 48), each.inject(context, torch.arange(40)))
        for each in (before, draft)
    )
    assert torch.equal(grown, earlier)
    grown.square().sum().backward()
    for layer in draft.layers[2:]:  # they are not dead, and no noise
        for name in "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj":
            last = before.layers[-1].get_submodule(name).weight
            assert torch.equal(layer.get_submodule(name).weight, last)
        assert layer.self_attn.o_proj.weight.grad.any()
        assert layer.mlp.down_proj.weight.grad.any()


def test_parts_of_dflash2_begin_without_effect(
    target: Any, tokenizer: Any, qwen3_pair: Pair
) -> None:
    plain = load_draft(qwen3_pair.draft)
    settings = DraftSettings(
        num_layers=plain.config.num_layers,
        target_layer_ids=plain.config.target_layer_ids,
        intermediate_size=plain.config.intermediate_size,
        block_size=8,
        selector_rank=4,
        selector_top_k=7,
        conv_kernel_size=2,
        conv_group_size=16,
    )
    config = draft_config_json(target, tokenizer, settings)
    assert config["architectures"] == ["DFlash2DraftModel"]
    draft = continued_draft(config, str(qwen3_pair.draft), seed=0)
    context = torch.randn(1, 5, plain.fc.in_features)
    embeddings, positions = torch.randn(1, 8, 64), torch.arange(5, 13)
    with torch.no_grad():
        states = [
            each(embeddings, positions, each.inject(context, torch.arange(5)))
            for each in (plain, draft)
        ]
        assert torch.equal(*states)
        assert draft.candidate_selector is not None
        ids = torch.arange(5).expand(8, -1)
        assert not draft.candidate_selector.pair_scores(states[1][0], ids, ids).any()


def test_a_draft_that_goes_on_still_knows_the_earlier_ones_tokens(tmp_path: Path) -> None:
    seen = torch.tensor([5, 3])
    assert known_tokens(seen, None) is seen
    assert known_tokens(seen, str(tmp_path)) is None
    write_token_map(tmp_path, torch.tensor([9, 5]))
    known = known_tokens(seen, str(tmp_path))
    assert known is not None
    assert known.tolist() == [3, 5, 9]
