# SPDX-License-Identifier: Apache-2.0
"""Texts of a tiny target: the target's own, captured right, and the same after a stop."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import Pair, random_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

import sglang_dflash.training.data
from sglang_dflash.hf import context_features
from sglang_dflash.training.answers import answer, capture
from sglang_dflash.training.captured import Capture, Text, captured_features
from sglang_dflash.training.data import build_corpus, corpus_is_complete
from sglang_dflash.training.prompts import prompt_tokens
from sglang_dflash.training.settings import DataSettings, SettingsError

KEEP = Capture(layer_ids=(0, 2), num_laws=4)
SETTINGS = DataSettings(
    prompts=("auto:20",),
    max_new_tokens=12,
    batch_size=4,
    texts_per_shard=6,
    held_out_share=0.3,
    num_laws=4,
)


@pytest.fixture(scope="module")
def target(llama_pair: Pair) -> Any:
    model = AutoModelForCausalLM.from_pretrained(llama_pair.target, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer(llama_pair: Pair) -> Any:
    return AutoTokenizer.from_pretrained(llama_pair.target)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [random_prompt(length, generator)[0].tolist() for length in (3, 11, 7, 5)]


def answered(
    target: Any, temperatures: list[float], stops: frozenset[int] = frozenset()
) -> list[Text]:
    return answer(
        target,
        prompts(),
        temperatures,
        KEEP,
        max_new_tokens=20,
        top_k=50,
        stop_ids=stops,
        generator=torch.Generator().manual_seed(1),
    )


def test_greedy_answers_are_those_of_transformers(target: Any) -> None:
    for prompt, text in zip(prompts(), answered(target, [0.0] * 4), strict=True):
        expected = target.generate(
            torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False
        )
        assert text.tokens.tolist() == expected[0].tolist()
        assert text.start == len(prompt)


def test_what_is_captured_while_decoding_is_what_one_pass_gives(target: Any) -> None:
    for text in answered(target, [0.0, 0.7, 0.0, 0.7]):
        output = target(text.tokens[None].long(), output_hidden_states=True)
        features = context_features(output.hidden_states, KEEP.layer_ids)[0]
        laws = output.logits[0].log_softmax(-1)
        read = slice(0, len(text.tokens) - 1)
        torch.testing.assert_close(
            text.features[read].float(), features[read], atol=0.05, rtol=0.02
        )
        assert not text.features[-1].any()
        for row in range(text.start - 1, len(text.tokens) - 1):
            ids = text.law_ids[row].long()
            assert int(text.tokens[row + 1]) in ids.tolist()
            torch.testing.assert_close(
                text.law_logprobs[row].float(), laws[row, ids], atol=0.01, rtol=0.01
            )


def test_only_the_captured_layers_outputs_are_held(target: Any) -> None:
    ids = torch.tensor(prompts()[:1])
    asked = target(ids, output_hidden_states=KEEP.hidden_states).hidden_states
    assert [i for i, state in enumerate(asked) if state is not None] == [0, 2]
    every = target(
        ids, output_hidden_states=True
    ).hidden_states  # as of a target that takes no list
    features = context_features(every, KEEP.layer_ids).bfloat16()
    for states in asked, every:
        assert torch.equal(captured_features(states, KEEP, tuple(ids.shape)), features)
    assert Capture().hidden_states is False


def test_capturing_a_given_text_equals_capturing_while_decoding(target: Any) -> None:
    for text in answered(target, [0.0, 0.7, 0.0, 0.7]):
        given = capture(target, text.tokens.tolist(), text.start, KEEP)
        assert torch.equal(given.tokens, text.tokens)
        torch.testing.assert_close(given.features, text.features, atol=0.05, rtol=0.02)
        torch.testing.assert_close(given.law_logprobs, text.law_logprobs, atol=0.01, rtol=0.01)


def test_a_text_ends_at_its_stop_token_and_the_others_go_on(target: Any) -> None:
    whole = answered(target, [0.0] * 4)
    stop = int(whole[1].tokens[whole[1].start + 4])
    for text, full in zip(answered(target, [0.0] * 4, frozenset([stop])), whole, strict=True):
        expected = full.tokens[full.start :].tolist()
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        assert text.tokens[text.start :].tolist() == expected


def test_sampled_answers_follow_the_target(target: Any) -> None:
    """The first token of many answers to one prompt, by the target's own law."""
    prompt, number = prompts()[0], 3000
    texts = answer(
        target,
        [prompt] * number,
        [0.7] * number,
        Capture(),
        max_new_tokens=1,
        top_k=5,
        stop_ids=frozenset(),
        generator=torch.Generator().manual_seed(2),
    )
    drawn = torch.bincount(torch.tensor([int(t.tokens[-1]) for t in texts]), minlength=320)
    logits, ids = target(torch.tensor([prompt])).logits[0, -1].topk(5)
    law = torch.zeros(320).scatter(0, ids, torch.softmax(logits / 0.7, dim=-1))
    assert not drawn[law == 0].any()
    likely = law * number >= 5
    spread = (drawn - law * number)[likely].square() / (law * number)[likely]
    assert float(spread.sum()) < 40  # 4 degrees of freedom


def digest(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("texts-*"))}


def test_a_stopped_run_goes_on_to_the_same_texts(
    target: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    build_corpus(whole, target, tokenizer, SETTINGS, (0, 2), quiet=True)
    assert corpus_is_complete(whole)
    real = sglang_dflash.training.data.write_shard

    def killed(path: Path, *rest: Any) -> None:
        if path.name == "texts-00001.safetensors":
            raise KeyboardInterrupt
        real(path, *rest)

    monkeypatch.setattr(sglang_dflash.training.data, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(stopped, target, tokenizer, SETTINGS, (0, 2), quiet=True)
    assert not corpus_is_complete(stopped)
    assert len(digest(stopped)) == 1
    monkeypatch.undo()
    corpus = build_corpus(stopped, target, tokenizer, SETTINGS, (0, 2), quiet=True)
    assert digest(stopped) == digest(whole)
    assert {info.kind for info in corpus.infos} == {"auto"}
    assert corpus.split(held_out=True)
    for number, info in enumerate(corpus.infos):
        text = corpus.read(number)
        assert (len(text.tokens), text.start) == (info.length, info.start)


def test_texts_made_otherwise_are_refused(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    build_corpus(tmp_path, target, tokenizer, SETTINGS, (0, 2), quiet=True)
    with pytest.raises(SettingsError, match="another layer_ids"):
        build_corpus(tmp_path, target, tokenizer, SETTINGS, (0, 1), quiet=True)


def test_texts_of_a_targets_base_are_refused(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    build_corpus(tmp_path / "base", target, tokenizer, SETTINGS, (0, 2), quiet=True)
    tuned = copy.deepcopy(target)
    tuned.model.layers[0].mlp.up_proj.weight[0] += 1.0
    more = dataclasses.replace(SETTINGS, more_texts=(str(tmp_path / "base"),))
    for folder, settings in ("base", SETTINGS), ("own", more):
        with pytest.raises(SettingsError, match="made with another target"):
            build_corpus(tmp_path / folder, tuned, tokenizer, settings, (0, 2), quiet=True)


def test_texts_that_name_their_target_in_the_former_way_are_taken(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """By the first 256 rows of the embedding alone."""
    build_corpus(tmp_path / "before", target, tokenizer, SETTINGS, (0, 2), quiet=True)
    manifest = tmp_path / "before" / "manifest.json"
    rows = target.get_input_embeddings().weight[:256].numpy().tobytes()
    former = {"target": hashlib.sha256(rows).hexdigest()[:16]}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | former))
    more = dataclasses.replace(SETTINGS, more_texts=(str(manifest.parent),))
    for folder, settings in ("before", SETTINGS), ("own", more):
        build_corpus(tmp_path / folder, target, tokenizer, settings, (0, 2), quiet=True)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"target": "0" * 16}))
    with pytest.raises(SettingsError, match="made with another target"):
        build_corpus(tmp_path / "before", target, tokenizer, SETTINGS, (0, 2), quiet=True)


def test_changed_prompts_are_refused(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    settings = DataSettings(prompts=(str(file),), held_out_share=0.5, max_new_tokens=3)
    for lines, is_refused in ("abcdefgh", False), ("abcdefgh", False), ("abcdefgi", True):
        file.write_text("\n".join(lines))
        with pytest.raises(SettingsError, match="other prompts") if is_refused else nullcontext():
            build_corpus(tmp_path / "texts", target, tokenizer, settings, (0, 2), quiet=True)


def test_texts_of_earlier_runs_are_read_beside_those_of_this(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    made = {}
    for name, seed in ("earlier", 0), ("now", 1):
        own = dataclasses.replace(SETTINGS, seed=seed)
        made[name] = build_corpus(tmp_path / name, target, tokenizer, own, (0, 2), quiet=True)
    both = dataclasses.replace(own, more_texts=(str(tmp_path / "earlier"),))
    corpus = build_corpus(tmp_path / "now", target, tokenizer, both, (0, 2), quiet=True)
    expected = [
        part.read(number)
        for part in (made["now"], made["earlier"])
        for number in range(len(part.infos))
    ]
    assert len(corpus.infos) == len(expected) > len(made["now"].infos)
    for number, text in enumerate(expected):
        found = corpus.read(number)
        assert torch.equal(found.tokens, text.tokens)
        assert torch.equal(found.features, text.features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out_share": 0.4}, "made with held_out_share 0.3, and this run has 0.4"),
        ({"num_laws": 8}, "made with num_laws 4, and this run has 8"),
        ({"more_texts": ("gone",)}, "gone does not hold the whole texts"),
        ({"more_texts": ("gone", "./gone")}, "a folder is named twice"),
    ],
)
def test_texts_that_cannot_stand_beside_others_are_refused_before_any_is_made(
    change: dict[str, Any], message: str, target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    build_corpus(tmp_path / "earlier", target, tokenizer, SETTINGS, (0, 2), quiet=True)
    more = {"more_texts": (str(tmp_path / "earlier"),)} | change
    settings = dataclasses.replace(SETTINGS, **more)
    with pytest.raises(SettingsError, match=message):
        build_corpus(tmp_path / "now", target, tokenizer, settings, (0, 2), quiet=True)
    assert not list((tmp_path / "now").glob("*"))


def test_a_disk_that_is_too_small_is_refused_before_a_text_is_made(
    target: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, texts = tmp_path / "prompts.txt", tmp_path / "texts"
    file.write_text("\n".join("abcdefgh"))
    settings = DataSettings(prompts=(str(file),), held_out_share=0.5, max_new_tokens=3)
    prompt = len(prompt_tokens("a", tokenizer, settings))
    needed = 8 * (prompt + 3) * (4 + 2 * 2 * 64 + 6 * 16)  # 2 layers of width 64, 16 laws
    free = [needed - 1]
    monkeypatch.setattr(
        sglang_dflash.training.data.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0])
    )
    with pytest.raises(SettingsError, match=r"need up to .* GB .*lower data\.max_new_tokens"):
        build_corpus(texts, target, tokenizer, settings, (0, 2), quiet=True)
    assert not digest(texts)
    for free[0] in needed, 0:  # what is there needs no more space
        build_corpus(texts, target, tokenizer, settings, (0, 2), quiet=True)


def test_a_disk_that_is_too_small_is_refused_before_a_prompt_is_made_up(
    target: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "response": "c"}\n')
    settings = dataclasses.replace(SETTINGS, prompts=(str(file), "auto:20", "auto:8"))
    needed = 21 * 12 * (4 + 2 * 2 * 64 + 6 * 4)  # 2 layers of width 64, 4 laws
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(sglang_dflash.training.data.shutil, "disk_usage", lambda _: free)
    made = tmp_path / "texts" / "auto-prompts.json"
    for number, exists in (21, False), (None, True):
        with pytest.raises(SettingsError, match=f"{number or ''} texts, .* are free there"):
            build_corpus(tmp_path / "texts", target, tokenizer, settings, (0, 2), quiet=True)
        assert made.exists() is exists
        free.free = needed  # enough for the answers, and not for their prompts


def test_a_shard_may_have_no_usable_text(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    """An answer of one token has no row that learns."""
    file, texts = tmp_path / "prompts.jsonl", tmp_path / "texts"
    entries = [{"prompt": f"say {i}", "response": "ab" if i == 7 else "a"} for i in range(8)]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    settings = DataSettings(prompts=(str(file),), held_out_share=0.5, texts_per_shard=1)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None  # else it is the second token of each
    for _ in range(2):
        corpus = build_corpus(texts, target, tokenizer, settings, (0, 2), quiet=True)
        assert len(list(texts.glob("texts-*.safetensors"))) == 8
        assert [corpus.read(0).tokens[-2:].tolist()] == [[ord("a"), ord("b")]]
        assert corpus.vocabulary([0]).tolist()
        assert len(corpus.infos) == 1


def test_given_responses_are_kept_and_each_prompt_is_taken_once(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / "given.jsonl"
    entries = [{"prompt": f"say {i % 10}", "response": f"it is {i % 10}"} for i in range(20)]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    settings = DataSettings(prompts=(str(file),), held_out_share=0.5)
    corpus = build_corpus(tmp_path / "texts", target, tokenizer, settings, (0, 2), quiet=True)
    texts = [corpus.read(i) for i in range(len(corpus.infos))]
    answers = sorted(tokenizer.decode(text.tokens[text.start :].tolist()) for text in texts)
    assert answers == [f"it is {i}<|im_end|>" for i in range(10)]
