# SPDX-License-Identifier: Apache-2.0
"""All prompts of a sweep as token ids: every engine is asked the same ones in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.config import DatasetSpec, Recipe
from bench.errors import BenchError
from bench.plan import Point, levels_of, num_prompts
from bench.prompts import encode, load_prompts, random_prompts

__all__ = ["PromptSets"]


class PromptSets:
    """Prompts by dataset, tokenised here: no server's own chat template comes into it."""

    def __init__(self, recipe: Recipe, folder: Path, target: str) -> None:
        """Read, check and tokenise all datasets.

        Args:
            recipe: The sweep.
            folder: Where relative paths start.
            target: Folder or hub name that has the tokenizer.

        Raises:
            BenchError: a dataset or the tokenizer cannot be read, or has too few prompts.
        """
        self._recipe = recipe
        self._ids: dict[str, list[list[int]]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        read = [self._read(spec, folder) for spec in recipe.datasets]  # before the slow tokenizer
        self._tokenizer = tokenizer = _tokenizer(target)
        for spec, texts in zip(recipe.datasets, read, strict=True):
            if texts is None:
                most = max(num_prompts(recipe.load, level) for level in levels_of(recipe.load))
                ids = random_prompts(spec, most, tokenizer.vocab_size, recipe.load.seed)
                self._facts[spec.name] = {"source": "random tokens", "rows": most}
            else:
                ids = [encode(tokenizer, text, recipe.load.chat_template) for text in texts]
            self._ids[spec.name] = ids
            slots = max(recipe.load.concurrency, default=1)
            if len(ids) < slots:
                raise BenchError(
                    f"dataset {spec.name} has {len(ids)} prompts, concurrency {slots} needs as many"
                )

    def of(self, point: Point, count: int) -> list[list[int]]:
        """Return a point's prompts, at most as many as there are: none comes twice.

        Each repeat goes on where the one before it stopped.
        """
        ids = self._ids[point.dataset]
        count = min(count, len(ids))
        start = point.repeat * count
        return [ids[(start + i) % len(ids)] for i in range(count)]

    def some(self, count: int) -> list[list[int]]:
        """Return prompts to warm up with: the datasets' last ones, in turn."""
        columns = list(self._ids.values())
        return [
            columns[i % len(columns)][-1 - i // len(columns) % len(columns[i % len(columns)])]
            for i in range(count)
        ]

    def write_conversations(self, path: Path, ids: list[list[int]]) -> None:
        """Write prompts as text, in the form that `sglang.bench_serving` calls "custom".

        Raises:
            BenchError: a text has other tokens than the prompt.
        """
        texts = [self._tokenizer.decode(prompt) for prompt in ids]
        if any(self._tokenizer.encode(t) != i for t, i in zip(texts, ids, strict=True)):
            raise BenchError("a prompt's text has other tokens: it cannot be sent as text")
        turns = [[{"content": text}, {"content": "an answer"}] for text in texts]
        lines = [json.dumps({"conversations": turn}) + "\n" for turn in turns]
        path.write_text("".join(lines), encoding="utf-8")

    def count_tokens(self, text: str) -> int:
        """Return how many tokens the target's tokenizer makes of `text`."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def has_text(self, dataset: str) -> bool:
        """Whether it is text, and not random tokens."""
        return "sha256" in self._facts[dataset]

    def manifest(self) -> dict[str, dict[str, Any]]:
        """Return source, number and hash of each dataset's prompts."""
        return self._facts

    def _read(self, spec: DatasetSpec, folder: Path) -> list[str] | None:
        if spec.random_tokens is not None:
            return None
        prompts = load_prompts(spec, self._recipe.load.seed, folder)
        self._facts[spec.name] = {
            "source": prompts.source, "rows": len(prompts.texts), "sha256": prompts.sha256,
        }  # fmt: skip
        return prompts.texts


def _tokenizer(target: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read the tokenizer of {target}: {error}") from error
