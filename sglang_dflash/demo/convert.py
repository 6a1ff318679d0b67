# SPDX-License-Identifier: Apache-2.0
"""A Llama-family GGUF with a byte-level BPE vocabulary -> a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang_dflash.demo import DemoError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

__all__ = ["ConversionError", "convert_gguf"]

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(DemoError):
    """The GGUF file holds something that this converter does not know."""


class _Heads(NamedTuple):
    query: int
    key_value: int


def convert_gguf(
    gguf_path: Path, out_dir: Path, *, on_tensor: Callable[[int, int], None] | None = None
) -> None:
    """Write `gguf_path` into the existing folder `out_dir` as bfloat16 safetensors.

    Args:
        gguf_path: A GGUF file of architecture `llama` with a `gpt2` (byte-level BPE) tokenizer.
        out_dir: Receives config.json, generation_config.json, the tokenizer and the weights.
        on_tensor: Called with (tensors done, tensors in all) after each tensor.

    Raises:
        ConversionError: another architecture, tokenizer or tensor name.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    fields = _Fields(reader)
    fields.require("general.architecture", "llama")
    fields.require("tokenizer.ggml.model", "gpt2")
    _write_json(out_dir / "config.json", _config(reader, fields))
    _write_json(out_dir / "generation_config.json", _generation_config(fields))
    _write_tokenizer(fields, out_dir)
    _write_weights(reader, fields, out_dir, on_tensor or (lambda done, total: None))


class _Fields:
    """The metadata of a GGUF file, by name."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, name: str):
        if name not in self._fields:
            raise ConversionError(f"the GGUF file has no field {name!r}")
        return self._fields[name].contents()

    def require(self, name: str, value: str) -> None:
        if self[name] != value:
            raise ConversionError(f"the GGUF file has {name} = {self[name]!r}, expected {value!r}")

    def heads(self) -> _Heads:
        return _Heads(self["llama.attention.head_count"], self["llama.attention.head_count_kv"])


def _config(reader: GGUFReader, fields: _Fields) -> dict:
    heads, hidden = fields.heads(), fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads.query,
        "num_key_value_heads": heads.key_value,
        "head_dim": hidden // heads.query,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores it as float32: 1e-5 reads back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _generation_config(fields: _Fields) -> dict:
    ids = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for name, key in ids.items()
    }


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(fields: _Fields, out_dir: Path) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    _tokenizer(fields).save(str(out_dir / "tokenizer.json"))
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _tokenizer(fields: _Fields) -> Tokenizer:
    """Return the byte-level BPE of the file, with the split of its `pre` kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # `smollm` takes every digit alone before GPT-2's split; llama.cpp's unicode tables say so too.
    fields.require("tokenizer.ggml.pre", "smollm")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _write_weights(
    reader: GGUFReader, fields: _Fields, out_dir: Path, on_tensor: Callable[[int, int], None]
) -> None:
    from safetensors.torch import save_file

    weights = {}
    for done, (name, weight) in enumerate(_weights(reader.tensors, fields.heads()), start=1):
        weights[name] = weight
        on_tensor(done, len(reader.tensors))
    path = out_dir / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod((out_dir / "config.json").stat().st_mode)  # safetensors writes for the owner only


def _weights(tensors: list[ReaderTensor], heads: _Heads) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor under its Hugging Face name, dequantized, in bfloat16."""
    import torch
    from gguf import dequantize

    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.rsplit(".", 2)[-2]
        if kind in {"attn_q", "attn_k"}:
            weight = _unpermute(weight, heads.query if kind == "attn_q" else heads.key_value)
        yield _hf_name(tensor.name), torch.tensor(weight, dtype=torch.bfloat16)


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return q or k rows [heads * d, in] in Hugging Face's rotary order.

    GGUF interleaves the two halves of each head's rotation (pairs 2i, 2i+1); Hugging Face keeps
    them apart (pairs i, i + d/2).
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    block, kind = stem.rsplit(".", 1) if stem.startswith("blk.") else ("", stem)
    if kind not in NAMES or suffix != "weight":
        raise ConversionError(f"the GGUF file holds a tensor of unknown name: {name}")
    prefix = f"model.layers.{block.removeprefix('blk.')}." if block else ""
    return f"{prefix}{NAMES[kind]}.{suffix}"
