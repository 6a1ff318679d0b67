# SPDX-License-Identifier: Apache-2.0
"""spec_generate on transformers: the target's own text, by a draft that is read right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from pairs import MASK_TOKEN_ID, Pair, random_prompt
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

import sglang_dflash
from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.hf import HFDraft, context_features, load_draft, spec_generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUNDLED = Path(sglang_dflash.__file__).parent / "assets" / "smollm2-135m-dflash-b8"


class Loaded(NamedTuple):
    """A pair in memory, float32."""

    pair: Pair
    target: PreTrainedModel
    draft: HFDraft


def loaded(pair: Pair) -> Loaded:
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    return Loaded(pair, target, load_draft(pair.draft))


@pytest.fixture(scope="module")
def llama(llama_pair: Pair) -> Loaded:
    return loaded(llama_pair)


@pytest.fixture(scope="module")
def qwen3(qwen3_pair: Pair) -> Loaded:
    return loaded(qwen3_pair)


@pytest.fixture(scope="module")
def windowed(windowed_pair: Pair) -> Loaded:
    return loaded(windowed_pair)


@pytest.fixture(scope="module")
def dflash2(dflash2_pair: Pair) -> Loaded:
    return loaded(dflash2_pair)


@pytest.fixture(params=["llama", "qwen3", "windowed", "dflash2"])
def any_pair(request: pytest.FixtureRequest) -> Loaded:
    return request.getfixturevalue(request.param)


def prompt(length: int, seed: int) -> torch.Tensor:
    return random_prompt(length, torch.Generator().manual_seed(seed))


def plain(target: PreTrainedModel, ids: torch.Tensor, count: int, **options: Any) -> list[int]:
    """Return what transformers generates greedily."""
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        **({"eos_token_id": None} | options),
    )
    return out[0, ids.shape[1] :].tolist()


def tau(pair: Loaded, temperature: float = 0.0, **options: Any) -> float:
    """Return the acceptance length over a few prompts."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    for seed in range(6):
        lengths += spec_generate(
            pair.draft, pair.target, prompt(16, seed), 64, temperature,
            stop_token_ids=(), generator=generator, **options,
        ).acceptance_lengths  # fmt: skip
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
@pytest.mark.parametrize("prompt_tokens", [1, 90])
def test_greedy_text_is_the_targets_own(
    any_pair: Loaded, prompt_tokens: int, block_size: int
) -> None:
    ids = prompt(prompt_tokens, seed=block_size)
    result = spec_generate(
        any_pair.draft, any_pair.target, ids, 40, stop_token_ids=(), block_size=block_size
    )
    assert list(result.tokens) == plain(any_pair.target, ids, 40)
    assert result.finish_reason == "length"
    assert max(result.acceptance_lengths) <= block_size
    committed = 1 + sum(result.acceptance_lengths)  # the prefill's token, then the steps'
    assert 40 <= committed < 40 + block_size
    steps = len(result.acceptance_lengths)
    assert result.acceptance_length == sum(result.acceptance_lengths) / steps


@pytest.mark.parametrize(
    ("name", "greedy", "sampled"),
    [("llama", 1.8, 1.2), ("qwen3", 2.1, 1.3), ("windowed", 1.8, 1.2), ("dflash2", 3.0, 2.0)],
)
def test_acceptance_is_middling_and_has_a_floor(
    name: str, greedy: float, sampled: float, request: pytest.FixtureRequest
) -> None:
    pair: Loaded = request.getfixturevalue(name)
    assert greedy < tau(pair) < 6.0
    assert tau(pair, 1.0) > sampled


def test_a_larger_block_never_lowers_acceptance_much(qwen3: Loaded) -> None:
    assert tau(qwen3, block_size=3) > tau(qwen3, block_size=2)
    assert tau(qwen3, block_size=8) > tau(qwen3, block_size=3)


def test_text_is_not_a_short_loop(llama: Loaded) -> None:
    """Else a fault of positions or slots could hide."""
    tokens = plain(llama.target, prompt(16, 0), 96)
    assert len(set(tokens)) > 30
    assert all(tokens[-2 * n : -n] != tokens[-n:] for n in range(1, 20))


def test_argmax_gaps_are_far_above_rounding(llama: Loaded, qwen3: Loaded) -> None:
    for target in (llama.target, qwen3.target):
        ids = torch.cat([prompt(16, seed) for seed in range(4)])
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False,
            eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.stack(out.logits).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).flatten()
        assert gaps.min() > 1e-4
        assert gaps.median() > 1.0


@pytest.mark.parametrize("mistake", ["no context", "rolled context", "positions off by one"])
def test_a_fault_in_the_context_costs_acceptance(
    qwen3: Loaded, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tau(qwen3)
    inject = HFDraft.inject

    def wrong(self: HFDraft, features: torch.Tensor, positions: torch.Tensor) -> Any:
        if mistake == "no context":
            return inject(self, torch.zeros_like(features), positions)
        if mistake == "rolled context":
            return inject(self, features.roll(1, dims=1), positions)
        return inject(self, features, positions + 1)

    monkeypatch.setattr(HFDraft, "inject", wrong)
    assert tau(qwen3) < 0.75 * right


@pytest.mark.parametrize("place", [0, 1, 2, 5, 11, 23])
def test_text_ends_at_a_stop_token_inside_a_block(any_pair: Loaded, place: int) -> None:
    ids = prompt(16, seed=place)
    stop = plain(any_pair.target, ids, 40)[place]
    result = spec_generate(any_pair.draft, any_pair.target, ids, 40, stop_token_ids=[stop, 9])
    assert list(result.tokens) == plain(any_pair.target, ids, 40, eos_token_id=[stop, 9])
    assert result.finish_reason == "stop"
    assert result.tokens.index(stop) == len(result.tokens) - 1


def test_every_length_is_a_prefix_of_the_text(llama: Loaded) -> None:
    ids = prompt(16, seed=3)
    text = plain(llama.target, ids, 20)
    for count in range(1, 21):
        result = spec_generate(llama.draft, llama.target, ids, count, stop_token_ids=())
        assert list(result.tokens) == text[:count]
    one = spec_generate(llama.draft, llama.target, ids, 1)
    assert (one.acceptance_lengths, one.acceptance_length) == ((), 0.0)


def test_stop_tokens_default_to_the_targets_own(
    llama: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(16, seed=4)
    text = plain(llama.target, ids, 30)
    for eos in (text[7], [text[7]]):
        monkeypatch.setattr(llama.target.generation_config, "eos_token_id", eos)
        result = spec_generate(llama.draft, llama.target, ids, 30)
        assert list(result.tokens) == text[: text.index(text[7]) + 1]
        longer = spec_generate(llama.draft, llama.target, ids, 30, stop_token_ids=())
        assert list(longer.tokens) == text


@pytest.mark.parametrize("name", ["llama", "dflash2"])
def test_low_temperature_is_greedy_and_a_seed_repeats(
    name: str, request: pytest.FixtureRequest
) -> None:
    pair: Loaded = request.getfixturevalue(name)
    ids = prompt(16, seed=5)

    def sample(temperature: float, seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        return spec_generate(
            pair.draft, pair.target, ids, 32, temperature, generator=generator
        ).tokens

    assert list(sample(1e-3, 0)) == plain(pair.target, ids, 32)
    assert sample(1.0, 7) == sample(1.0, 7)
    assert sample(1.0, 7) != sample(1.0, 8)


def test_features_are_the_outputs_of_the_named_layers(llama: Loaded) -> None:
    outputs: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out, i=i: outputs.update({i: out}))
        for i, layer in enumerate(llama.target.model.layers)
    ]
    states = llama.target(prompt(9, 0), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    expected = torch.cat([outputs[0], outputs[2]], dim=-1)
    assert torch.equal(context_features(states, (0, 2)), expected)


def test_checkpoint_may_have_a_prefix_and_another_type(llama: Loaded, tmp_path: Path) -> None:
    weights = load_file(llama.pair.draft / "model.safetensors")
    (tmp_path / "config.json").write_text((llama.pair.draft / "config.json").read_text())
    save_file({f"model.{k}": v for k, v in weights.items()}, tmp_path / "model.safetensors")
    draft = load_draft(tmp_path, torch.bfloat16)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert torch.equal(draft.norm.weight, llama.draft.norm.weight.bfloat16())
    assert not draft.training
    del weights["fc.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=r"missing: fc\.weight"):
        load_draft(tmp_path)


def test_the_selector_raises_acceptance(dflash2: Loaded) -> None:
    draft = load_draft(dflash2.pair.draft)
    assert draft.candidate_selector is not None
    draft.candidate_selector.successor_codebook.zero_()
    without = dflash2._replace(draft=draft)
    assert tau(dflash2) > 1.1 * tau(without)
    assert tau(dflash2, 1.0) > 1.1 * tau(without, 1.0)


@pytest.mark.parametrize(
    "name",
    ["candidate_selector.successor_codebook", "candidate_selector.hidden_projection.weight",
     "layers.1.mlp_conv.base_kernel"],
)  # fmt: skip
def test_missing_part_of_dflash2_is_refused_by_name(
    dflash2: Loaded, tmp_path: Path, name: str
) -> None:
    weights = load_file(dflash2.pair.draft / "model.safetensors")
    (tmp_path / "config.json").write_text((dflash2.pair.draft / "config.json").read_text())
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=f"missing: {name}".replace(".", r"\.")):
        load_draft(tmp_path)


def test_bundled_draft_loads_in_its_stored_type() -> None:
    draft = load_draft(BUNDLED)
    assert draft.fc.weight.dtype == torch.bfloat16
    context = draft.inject(torch.zeros(1, 4, 5 * 576).bfloat16(), torch.arange(4))
    hidden = draft(torch.zeros(1, 8, 576).bfloat16(), torch.arange(4, 12), context)
    assert hidden.shape == (1, 8, 576)


@pytest.mark.parametrize("shape", [(2, 5), (5,), (1, 0), (1, 2, 3)])
def test_anything_but_one_prompt_is_refused(llama: Loaded, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="decodes one prompt"):
        spec_generate(llama.draft, llama.target, torch.ones(shape, dtype=torch.int64), 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"block_size": 0}, "2 or more"),
        ({"block_size": 1}, "2 or more"),
    ],
)
def test_bad_arguments_are_named(llama: Loaded, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec_generate(llama.draft, llama.target, prompt(4, 0), **({"max_new_tokens": 4} | options))


def test_block_larger_than_the_window_is_refused(windowed: Loaded) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="sliding window of 16"):
        spec_generate(windowed.draft, windowed.target, prompt(4, 0), 4, block_size=17)


def test_pair_that_does_not_fit_is_refused(llama: Loaded) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="hidden_size is 576 and the target's is 64"):
        spec_generate(load_draft(BUNDLED, torch.float32), llama.target, prompt(4, 0), 4)
    with pytest.raises(ValueError, match=r"draft is torch\.bfloat16 on cpu, target torch\.f"):
        spec_generate(load_draft(llama.pair.draft, torch.bfloat16), llama.target, prompt(4, 0), 4)


def test_target_that_changes_its_logits_is_refused(llama: Loaded) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 320, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    target = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).eval()
    with pytest.raises(ValueError, match=r"final_logit_softcapping.*with SGLang"):
        spec_generate(llama.draft, target, prompt(4, 0), 4)


def test_target_with_recurrent_layers_is_refused(
    llama: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = ["linear_attention", "full_attention"] * 2
    monkeypatch.setattr(llama.target.config, "layer_types", types, raising=False)
    with pytest.raises(ValueError, match="linear_attention layers"):
        spec_generate(llama.draft, llama.target, prompt(4, 0), 4)


def test_missing_mask_token_is_refused(llama: Loaded) -> None:
    draft = load_draft(llama.pair.draft)
    assert draft.config.mask_token_id == MASK_TOKEN_ID
    draft.config = replace(draft.config, mask_token_id=None)
    with pytest.raises(UnsupportedCheckpoint, match="mask_token_id is missing"):
        spec_generate(draft, llama.target, prompt(4, 0), 4)


def test_no_sglang_is_needed() -> None:
    code = "import sys, sglang_dflash.hf; assert 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
