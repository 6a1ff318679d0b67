# SPDX-License-Identifier: Apache-2.0
"""Prompts of a dataset: read, wrapped as published, shuffled by a seed, and hashed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.config import DatasetSpec
from bench.errors import BenchError

__all__ = ["Prompts", "encode", "load_prompts", "random_prompts"]

DATA = Path(__file__).parent / "data"
WRAPPERS = {
    "none": "{}",
    "maths": "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "code": "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```",
}


class Known(NamedTuple):
    """A dataset that people compare on: where the hub has it, and how it is asked."""

    repository: str
    subset: str | None
    split: str
    wrapper: str


# The names, splits and wrappers that published DFlash results use.
KNOWN = {
    "gsm8k": Known("openai/gsm8k", "main", "test", "maths"),
    "math500": Known("HuggingFaceH4/MATH-500", None, "test", "maths"),
    "humaneval": Known("openai/openai_humaneval", None, "test", "code"),
    "mbpp": Known("google-research-datasets/mbpp", "sanitized", "test", "none"),
    "mt-bench": Known("HuggingFaceH4/mt_bench_prompts", None, "train", "none"),
    "speed-bench": Known("nvidia/SPEED-Bench", "qualitative", "test", "none"),
}
FIELDS = ("turns", "question", "problem", "prompt")


class Prompts(NamedTuple):
    """Prompts in the order that they are asked.

    Attributes:
        name: The dataset's name.
        texts: User turns; of a conversation, the first.
        source: Where they came from, for the manifest.
        sha256: Over the texts in order.
    """

    name: str
    texts: list[str]
    source: str
    sha256: str


def load_prompts(spec: DatasetSpec, seed: int, folder: Path) -> Prompts:
    """Return a dataset's prompts.

    Args:
        spec: Which; not random tokens.
        seed: Of the shuffle.
        folder: What a relative path starts from: the recipe's folder.

    Raises:
        BenchError: no such file or dataset, or rows without a prompt; the text says which.
    """
    known = KNOWN.get(spec.name)
    if spec.path is not None:
        path = folder / Path(spec.path).expanduser()
        rows, source = _read(path, spec.name), path.name
    elif known is None:
        raise BenchError(
            f"dataset {spec.name}: not one of {', '.join(KNOWN)}; give a 'path' to a JSONL"
        )
    elif spec.source == "sample":
        path = DATA / f"{spec.name}.jsonl"
        if not path.is_file():
            here = ", ".join(sorted(name for name in KNOWN if (DATA / f"{name}.jsonl").is_file()))
            raise BenchError(f"dataset {spec.name}: no sample in the repository (there: {here})")
        rows, source = _read(path, spec.name), f"sample {path.name}"
    else:
        rows, source = _from_hub(spec.name, known), f"hub {known.repository}"
    wrap = WRAPPERS[spec.wrapper or (known.wrapper if known else "none")]
    texts = [wrap.format(_prompt(row, f"{source}, row {i + 1}")) for i, row in enumerate(rows)]
    random.Random(seed).shuffle(texts)
    texts = texts[: spec.rows]
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return Prompts(spec.name, texts, source, digest)


def random_prompts(spec: DatasetSpec, count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of random token ids, all different with near certainty."""
    assert spec.random_tokens is not None
    generator = random.Random(seed)
    return [
        [generator.randrange(vocabulary) for _ in range(spec.random_tokens)] for _ in range(count)
    ]


def encode(tokenizer: Any, text: str, template: dict[str, Any]) -> list[int]:
    """Return the tokens of `text` as a chat's first turn, or bare where there is no template."""
    if not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    turn = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(
        turn, tokenize=False, add_generation_prompt=True, **template
    )
    return tokenizer(chat, add_special_tokens=False)["input_ids"]


def _read(path: Path, name: str) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"dataset {name}: cannot read {path}: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise BenchError(f"dataset {name}: {path}, line {number}: {error}") from error
    if not rows:
        raise BenchError(f"dataset {name}: {path} is empty")
    return rows


def _from_hub(name: str, known: Known) -> list[Any]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    load: Callable[..., Any] = load_dataset
    try:
        return list(load(known.repository, known.subset, split=known.split))
    except (OSError, ValueError, DatasetsError) as error:
        raise BenchError(
            f"dataset {name}: the hub does not give {known.repository}: {error}. Without a "
            "network, use 'source: sample' or a 'path' to a JSONL"
        ) from error


def _prompt(row: object, where: str) -> str:
    if isinstance(row, dict):
        for field in FIELDS:
            value = row.get(field)
            if isinstance(value, list) and value:  # HumanEval has a text, MT-Bench turns
                value = value[0]
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str) and value.strip():
                return value
    raise BenchError(f"{where}: no prompt; expected one of {', '.join(FIELDS)}")
