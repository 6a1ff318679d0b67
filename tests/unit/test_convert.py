# SPDX-License-Identifier: Apache-2.0
"""A draft in the speculators format becomes the same draft in z-lab's layout, or is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3VLConfig, Qwen3VLTextConfig

from sglang_dflash import cli
from sglang_dflash.draft.config import DraftConfig, expected_weights
from sglang_dflash.draft.convert import convert_draft
from sglang_dflash.draft.target_rows import TargetFiles
from sglang_dflash.draft.token_map import own_token_map
from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.hf import HFDraft, load_draft

VOCAB, HIDDEN, LAYERS = 5000, 16, 6  # more rows than are compared at a time
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
# As the library's `to_diff_dict` leaves it: what is Qwen3's default is not there.
BACKBONE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "sliding_window": 6,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": VOCAB,
}
STATED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [1, 3, 5],
    "base_model_ep_plan": None,
    "block_size": 4,
    "draft_vocab_size": VOCAB,
    "dtype": "bfloat16",
    "has_no_defaults_at_init": False,
    "mask_token_id": 7,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/target"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.6.0",
    "target_hidden_size": None,
    "transformers_version": "5.0.0",
}
# What it is in z-lab's layout, written down apart.
BY_HAND: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "vocab_size": VOCAB,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2, 4]},
}
Weights = dict[str, torch.Tensor]


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(scope="module", params=["apart", "tied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small target, its head apart or tied to its embedding."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2, tie_word_embeddings=request.param == "tied",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).bfloat16()
    folder = tmp_path_factory.mktemp("target")
    # Several files, as big targets have.
    model.save_pretrained(folder, max_shard_size="100KB" if request.param == "apart" else "1GB")
    return folder


@functools.cache
def vocabulary(target: Path) -> Weights:
    """Return the target's embedding and head, by the names that a draft has for them."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    return {EMBED: model.model.embed_tokens.weight.detach(), HEAD: model.lm_head.weight.detach()}


def trained() -> Weights:
    config = DraftConfig.from_dict(BY_HAND, source="by hand")
    shapes = expected_weights(config)
    return {name: random(seed, *shapes[name]) for seed, name in enumerate(sorted(shapes))}


def with_copies(target: Path, tokens: torch.Tensor | None = None) -> Weights:
    """Return a draft's weights as the library saved them before it left the target's out."""
    weights = trained() | vocabulary(target) | {"verifier_norm.weight": random(99, HIDDEN)}
    if tokens is None:
        return weights
    marked = torch.zeros(VOCAB, dtype=torch.bool)
    marked[tokens] = True
    offsets = tokens - torch.arange(len(tokens))
    return weights | {HEAD: weights[HEAD][tokens], "d2t": offsets, "t2d": marked}


def folder_of(folder: Path, weights: Weights, **changes: Any) -> Path:
    """Write a draft; `backbone` changes keys of the backbone, ... removes a key."""
    folder.mkdir(exist_ok=True)
    backbone = BACKBONE | changes.pop("backbone", {})
    stated = STATED | {"transformer_layer_config": backbone} | changes
    for keys in (stated, backbone):
        for key in [key for key, value in keys.items() if value is ...]:
            del keys[key]
    (folder / "config.json").write_text(json.dumps(stated))
    owned = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    save_file(owned, folder / "model.safetensors")
    return folder


def converted(tmp_path: Path, target: Path, weights: Weights, **changes: Any) -> Path:
    draft = folder_of(tmp_path / "draft", weights, **changes)
    convert_draft(str(draft), str(target), tmp_path / "out")
    return tmp_path / "out"


def hidden_of(draft: HFDraft) -> torch.Tensor:
    """Return a block's hidden rows behind a context of nine tokens, longer than the window."""
    context = draft.inject(random(50, 1, 9, 3 * HIDDEN).float(), torch.arange(9))
    return draft(random(51, 1, 4, HIDDEN).float(), torch.arange(9, 13), context)


def test_the_converted_draft_computes_what_its_weights_do_in_z_labs_layout(
    tmp_path: Path, target: Path
) -> None:
    weights = with_copies(target)
    out = converted(tmp_path, target, weights)
    by_hand = HFDraft(DraftConfig.from_dict(BY_HAND, source="by hand"))
    by_hand.load_state_dict(trained(), strict=True)
    draft = load_draft(out, torch.float32)
    assert torch.equal(hidden_of(draft), hidden_of(by_hand.float()))
    assert draft.config.target_layer_ids == by_hand.config.target_layer_ids
    assert draft.config.num_target_layers == LAYERS
    assert (draft.config.dtype, draft.config.mask_token_id) == ("bfloat16", 7)
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == trained().keys()
    assert all(torch.equal(stored[name], weights[name]) for name in stored)
    assert own_token_map(out) is None


def test_a_window_that_sees_its_whole_block_stays_so(tmp_path: Path, target: Path) -> None:
    out = converted(tmp_path, target, trained(), sliding_window_non_causal=True)
    config = DraftConfig.from_pretrained(out)
    assert (config.sliding_windows, config.causal) == ((6, None), (False, False))
    # Which SGLang's own worker reads too, unlike `causal`.
    assert json.loads((out / "config.json").read_text())["is_causal"] is False


def test_a_pruned_vocabulary_becomes_a_token_map(tmp_path: Path, target: Path) -> None:
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:4500].sort().values
    weights = with_copies(target, tokens)
    out = converted(tmp_path, target, weights, draft_vocab_size=4500)
    found = own_token_map(out)
    assert found is not None
    assert found.tolist() == tokens.tolist()
    load_draft(out)


@pytest.mark.parametrize("kept", [(), (EMBED,)])
def test_what_is_left_out_of_newer_checkpoints_is_not_missed(
    tmp_path: Path, target: Path, kept: tuple[str, ...]
) -> None:
    weights = trained() | {name: vocabulary(target)[name] for name in kept}
    load_draft(converted(tmp_path, target, weights))


@pytest.mark.parametrize("row", [0, 4096, VOCAB - 1])
@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_one_differing_row_is_refused_by_name(
    tmp_path: Path, target: Path, name: str, row: int
) -> None:
    weights = with_copies(target)
    weights[name] = weights[name].clone()
    weights[name][row, -1] += 1
    with pytest.raises(
        UnsupportedCheckpoint, match=rf"{name} differs .* row {row} \(token {row}\)"
    ):
        converted(tmp_path, target, weights)
    assert not (tmp_path / "out").exists()


def test_one_differing_row_of_a_pruned_head_is_refused(tmp_path: Path, target: Path) -> None:
    weights = with_copies(target, torch.arange(100, 300))
    weights[HEAD][20, 3] += 1
    with pytest.raises(UnsupportedCheckpoint, match=r"row 20 \(token 120\)"):
        converted(tmp_path, target, weights, draft_vocab_size=200)


def test_a_copy_in_float32_may_not_differ_by_less_than_bfloat16_shows(
    tmp_path: Path, target: Path
) -> None:
    weights = with_copies(target)
    wide = weights[HEAD].float()
    converted(tmp_path, target, weights | {HEAD: wide})
    (tmp_path / "other").mkdir()
    with pytest.raises(UnsupportedCheckpoint, match=HEAD):
        converted(tmp_path / "other", target, weights | {HEAD: wide * (1 + 1e-6)})


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Return a target's config without weights, which are not looked at."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_a_target_may_keep_its_weights_under_other_names_but_not_quantised(
    tmp_path: Path, tied: Path
) -> None:
    own = {EMBED: random(1, VOCAB, HIDDEN), HEAD: random(2, VOCAB, HIDDEN)}
    kept = {f"language_model.model.{EMBED}": own[EMBED], f"language_model.{HEAD}": own[HEAD]}
    save_file(kept, tied / "model.safetensors")
    converted(tmp_path, tied, trained() | own)
    (tmp_path / "other").mkdir()
    with pytest.raises(UnsupportedCheckpoint, match=HEAD):
        converted(tmp_path / "other", tied, trained() | own | {HEAD: own[EMBED]})
    for lost, words in (
        (kept | {f"language_model.{HEAD}": own[HEAD].to(torch.int8)}, "is I8"),
        ({f"language_model.model.{EMBED}": own[EMBED]}, f"has no {HEAD}"),
    ):
        save_file(lost, tied / "model.safetensors")
        with pytest.raises(UnsupportedCheckpoint, match=words):
            converted(tmp_path / "other", tied, trained() | own)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_from_anchor": True}, "the anchor's row predicts the next token"),
        ({"shift_label": True}, "shifted labels"),
        ({"projector_type": "domino"}, "Domino"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"speculators_model_type": "dspark"}, "'dspark', and only 'dflash' is converted"),
        ({"speculators_model_type": ...}, "served as it is"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None"),
        ({"backbone": {"model_type": "laguna"}}, "model_type is 'laguna'"),
        ({"backbone": {"hc_mult": 4}}, "hc_mult 4: unknown"),
        ({"backbone": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
        ({"backbone": {"use_sliding_window": ...}}, "use_sliding_window is false"),
        ({"backbone": {"rope_parameters": ...}}, "rope_theta is missing"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ({"aux_hidden_state_layer_ids": [0, 2, 4]}, "counted from 1"),
        ({"aux_hidden_state_layer_ids": [1, 3, 6]}, r"[5] cannot be captured"),
        ({"sliding_window_non_causal": ...}, "sliding_window_non_causal is None"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"block_size": ...}, "block_size is None"),
        ({"draft_vocab_size": 4500}, "d2t, which says which, is missing"),
        ({"use_swa": True}, "use_swa is True beside transformer_layer_config"),
        ({"target_hidden_size": 64}, "another width"),
        ({"brand_new": 3}, "brand_new 3: unknown"),
        ({"backbone": {"hidden_size": 32}}, "hidden_size is 32 and the target's is 16"),
        ({"backbone": {"vocab_size": 4000}}, "vocab_size is 4000 and the target's is 5000"),
        ({"backbone": {"intermediate_size": 40}}, "the weights are not those of its config.json"),
    ],
)
def test_what_cannot_be_told_or_done_is_refused(
    tmp_path: Path, tied: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint) as refused:
        converted(tmp_path, tied, trained(), **changes)
    assert words in str(refused.value)
    assert_named_as_given(str(refused.value), tmp_path / "draft")
    assert not (tmp_path / "out").exists()


def assert_named_as_given(message: str, draft: Path) -> None:
    assert message.startswith(f"DRAFT {draft}")
    assert "-model-path" not in message  # ends a server's options


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "config.json holds a list"),
        ("model.safetensors", None, "no *.safetensors there"),
        ("model.safetensors", "cut", "not a safetensors file"),
        ("model.safetensors.index.json", "{}", "has no readable weight_map"),
        ("mask_embedding.pt", "", "a mask embedding of its own"),
    ],
)
def test_files_that_cannot_be_read_are_named_as_given(
    tmp_path: Path, tied: Path, file: str, content: str | None, words: str
) -> None:
    draft = folder_of(tmp_path / "draft", trained())
    if content is None:
        (draft / file).unlink()
    else:
        (draft / file).write_text(content)
    with pytest.raises(UnsupportedCheckpoint) as refused:
        convert_draft(str(draft), str(tied), tmp_path / "out")
    assert words in str(refused.value)
    assert_named_as_given(str(refused.value), draft)


def test_packed_weights_are_refused(tmp_path: Path, tied: Path) -> None:
    weights = trained()
    weights["fc.weight"] = weights["fc.weight"].to(torch.int8)
    with pytest.raises(UnsupportedCheckpoint, match=r"torch\.int8, which is quantised"):
        converted(tmp_path, tied, weights)


@pytest.mark.parametrize(
    "broken",
    [
        {"d2t": torch.full((200,), 4900)},  # beyond the vocabulary
        {"d2t": -torch.arange(200)},  # one token for all
        {"d2t": torch.full((200,), 101)},  # others than t2d marks
    ],
)
def test_a_map_that_contradicts_itself_is_refused(
    tmp_path: Path, target: Path, broken: Weights
) -> None:
    weights = with_copies(target, torch.arange(100, 300)) | broken
    with pytest.raises(UnsupportedCheckpoint, match="d2t maps to no set of 200"):
        converted(tmp_path, target, weights, draft_vocab_size=200)


def test_a_pruned_draft_without_its_head_is_refused(tmp_path: Path, target: Path) -> None:
    weights = with_copies(target, torch.arange(100, 300))
    del weights[HEAD]
    with pytest.raises(UnsupportedCheckpoint, match=f"{HEAD} is missing"):
        converted(tmp_path, target, weights, draft_vocab_size=200)


def test_a_llama_backbone_has_the_defaults_of_llama(tmp_path: Path, tied: Path) -> None:
    """As the first published ones have it; head_dim and the KV heads follow from the others."""
    weights = trained()
    for name in weights:
        if "self_attn" not in name:
            continue
        rows = {"q_norm": 4, "k_norm": 4, "o_proj": HIDDEN}.get(name.split(".")[3], HIDDEN)
        shape = (rows,) if "norm" in name else (rows, HIDDEN)
        weights[name] = random(7, *shape)
    gone = ("head_dim", "num_key_value_heads", "layer_types", "sliding_window")
    backbone = dict.fromkeys((*gone, "use_sliding_window", "rope_parameters"), ...)
    backbone |= {"model_type": "llama", "mlp_bias": False, "rope_theta": 10000.0}
    stated = {"backbone": backbone, "sliding_window_non_causal": ..., "sample_from_anchor": ...}
    config = load_draft(converted(tmp_path, tied, weights, **stated)).config
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (4, 4, 10000.0)
    assert (config.sliding_windows, config.causal) == ((None, None), (False, False))
    assert config.max_position_embeddings == 2048


def test_a_target_that_scales_its_embeddings_is_refused(tmp_path: Path, tied: Path) -> None:
    stated = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(stated | {"embedding_multiplier": 12.0}))
    with pytest.raises(UnsupportedCheckpoint, match="scales its embeddings"):
        converted(tmp_path, tied, trained())


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_target_for_images_says_beside_its_texts_config_whether_it_is_tied(
    tmp_path: Path, is_tied: bool
) -> None:
    text = Qwen3VLTextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    whole = Qwen3VLConfig(text_config=text.to_dict(), tie_word_embeddings=is_tied)
    whole.save_pretrained(tmp_path)
    assert TargetFiles.read(str(tmp_path)).is_tied == is_tied


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"cut short"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", f'{{"weight_map": {{"{EMBED}": "gone"}}}}'.encode()),
    ],
)
def test_a_damaged_target_is_named(tmp_path: Path, tied: Path, name: str, content: bytes) -> None:
    (tied / name).write_bytes(content)
    with pytest.raises(UnsupportedCheckpoint, match=f"TARGET {tied}: .* cannot be read"):
        converted(tmp_path, tied, trained() | {EMBED: random(1, VOCAB, HIDDEN)})


def test_a_place_where_no_folder_can_be_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedCheckpoint, match=r"OUT .*file/out: .* is a file"):
        convert_draft("nothing", "nothing", tmp_path / "file/out")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, tied: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(UnsupportedCheckpoint, match="holds something"):
        converted(tmp_path, tied, trained())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]


def test_the_command_says_what_it_wrote(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = with_copies(target, torch.arange(100, 300))
    draft = folder_of(tmp_path / "draft", weights, draft_vocab_size=200)
    command = ["convert", str(draft), str(target), str(tmp_path / "out")]
    assert cli.main([*command, "--json"]) == 0
    told = capsys.readouterr()
    assert "trained for owner/target" in told.err  # which the folder's name is not
    assert json.loads(told.out) == {
        "out": str(tmp_path / "out"),
        "verifier": "owner/target",
        "block_size": 4,
        "mask_token_id": 7,
        "target_layer_ids": [0, 2, 4],
        "sliding_windows": [6, None],
        "causal": [True, False],
        "tokens": 200,
        "same_as_target": [EMBED, HEAD],
    }
    assert cli.main(command) == 1
    assert "sglang-dflash convert: OUT" in capsys.readouterr().err
    assert cli.main([*command[:3], str(tmp_path / "again")]) == 0
    assert "owner/target" in capsys.readouterr().out
    assert cli.main(["convert", str(tmp_path), str(target), str(tmp_path / "none")]) == 1
    told = capsys.readouterr().err
    assert f"convert: DRAFT {tmp_path}: no config.json" in told
