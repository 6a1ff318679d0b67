# SPDX-License-Identifier: Apache-2.0
"""Prompts from files, and which of them are held out."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dflash.training.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from sglang_dflash.training.settings import DataSettings

__all__ = [
    "AUTO",
    "Prompt",
    "Source",
    "check_sources",
    "parse_source",
    "prompt_tokens",
    "read_prompts",
    "share_of",
]

AUTO = "auto"
_TEXT_KEYS = ("prompt", "question", "instruction", "text")


@dataclass(frozen=True)
class Prompt:
    """A user's turn.

    Attributes:
        kind: Where it is from, for figures by kind.
        text: What the user says.
        response: An answer that the target gave elsewhere, or None to have one generated.
    """

    kind: str
    text: str
    response: str | None = None


class Source(NamedTuple):
    """One entry of `data.prompts`.

    Attributes:
        name: A path, or `auto`.
        limit: Most prompts to take, or None for all.
    """

    name: str
    limit: int | None


def check_sources(stated: Iterable[str]) -> None:
    """Raise now what `parse_source` and `read_prompts` would raise after a target is loaded.

    Raises:
        SettingsError: theirs; what is in a pipe is not checked, for it can be read once.
    """
    for each in stated:
        source = parse_source(each)
        path = Path(source.name).expanduser()
        is_stream = os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
        if source.name != AUTO and not is_stream:
            read_prompts(source)


def parse_source(stated: str) -> Source:
    """Return what `FILE`, `FILE:N` or `auto:N` says.

    Raises:
        SettingsError: a number below 1, or `auto` without one.
    """
    name, colon, number = stated.rpartition(":")
    if not colon or not number.lstrip("-").isdecimal():
        name, number = stated, ""
    if number and int(number) < 1:
        raise SettingsError(f"--prompts {stated}: {number} prompts, expected 1 or more")
    if name == AUTO and not number:
        raise SettingsError(f"--prompts {AUTO}: say how many, as in {AUTO}:2000")
    return Source(name, int(number) if number else None)


def read_prompts(source: Source) -> list[Prompt]:
    """Return the prompts of a JSONL file (.jsonl, .jsonl.gz, or plain text, one a line).

    A JSON line has one of `prompt`, `question`, `instruction`, `text`, `turns` (the first is
    taken) or `messages` (the first user's turn, a text or parts of text); `response` gives the
    target's answer.

    Raises:
        SettingsError: the file cannot be read, or a line is none of these.
    """
    path = Path(source.name).expanduser()
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompts {source.name}: cannot be read: {error}") from error
    if not numbered:
        raise SettingsError(f"--prompts {source.name}: no prompt in it")
    kind = path.name.split(".")[0]
    if ".json" not in path.name:
        return [Prompt(kind, line.strip()) for _, line in numbered[: source.limit]]
    return [
        _from_json(line, kind, f"--prompts {source.name}, line {i}")
        for i, line in numbered[: source.limit]
    ]


def prompt_tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, settings: DataSettings
) -> list[int]:
    """Return a prompt as the target reads it, up to where its answer begins.

    A tokenizer without a chat template takes the text as it is.

    Raises:
        SettingsError: the chat template refuses the messages, as some do those with or those
            without a system prompt.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    if settings.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": settings.system_prompt})
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=settings.thinking,
        )
    except TemplateError as error:
        refused = f"the target's chat template refuses messages of the roles {_roles(messages)}"
        if settings.system_prompt is None:
            raise SettingsError(
                f"TARGET: {refused} ({error}): mend its chat template, or set data.system_prompt "
                "where it asks for one"
            ) from error
        raise SettingsError(
            f"data.system_prompt is {settings.system_prompt!r}: {refused} ({error}): leave the "
            "setting out, or mend the template"
        ) from error
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def share_of(text: str, salt: str) -> float:
    """Return a number in [0, 1) that is the text's own: the same in every run and order."""
    digest = hashlib.sha256(f"{salt}\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _roles(messages: list[dict[str, str]]) -> str:
    return ", ".join(each["role"] for each in messages)


def _from_json(line: str, kind: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where}: not JSON: {error}") from error
    text = _text_of(entry) if isinstance(entry, dict) else None
    if not text:
        raise SettingsError(f"{where}: none of {', '.join(_TEXT_KEYS)}, turns, messages has a text")
    response = entry.get("response")
    return Prompt(kind, text, response if isinstance(response, str) and response else None)


def _text_of(entry: dict[str, Any]) -> str | None:
    for key in _TEXT_KEYS:
        if isinstance(entry.get(key), str):
            return entry[key]
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0]
    messages = entry.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return _spoken(message.get("content"))
    return None


def _spoken(content: object) -> str | None:
    """Return the text of a message, whole or in parts; None where it is more than text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    is_text = len(parts) == len(content) and all(isinstance(part, str) for part in parts)
    return "".join(parts) if is_text else None
