# SPDX-License-Identifier: Apache-2.0
"""The texts of a run: prompts gathered or made up, answered by the target, stored once.

A shard is the unit of resuming: its texts depend on the settings and its number alone, so that a
stopped run goes on to the same files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from sglang_dflash.files import whole_file
from sglang_dflash.training.answers import answer, capture
from sglang_dflash.training.auto_prompts import (
    auto_file,
    auto_prompts,
    generator_for,
    known_auto_prompts,
)
from sglang_dflash.training.captured import Capture, Text
from sglang_dflash.training.frozen import embedding_of
from sglang_dflash.training.prompts import (
    AUTO,
    Prompt,
    Source,
    parse_source,
    prompt_tokens,
    read_prompts,
    share_of,
)
from sglang_dflash.training.settings import DataSettings, SettingsError
from sglang_dflash.training.shards import (
    Corpus,
    TextInfo,
    manifest_path,
    read_manifest,
    shard_path,
    write_shard,
)
from sglang_dflash.training.target import embedding_digest, stop_tokens, target_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["build_corpus", "corpus_is_complete"]

log = logging.getLogger(__name__)


def build_corpus(
    folder: Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    layer_ids: tuple[int, ...],
    *,
    quiet: bool = False,
    accepted: Callable[[], None] | None = None,
) -> Corpus:
    """Return the texts in a folder, made as far as they are not there yet.

    Args:
        folder: Where they are kept.
        target: Who answers.
        tokenizer: Its tokenizer.
        settings: Which texts.
        layer_ids: The target's layers to capture.
        quiet: No progress bar.
        accepted: Called once the folders are known to fit, before anything slow.

    Raises:
        SettingsError: prompts cannot be had, a folder holds texts made in another way, or the
            disk is too small for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stated = _stated(settings, layer_ids, target)
    more = [Path(each) for each in settings.more_texts]
    if len({each.resolve() for each in (folder, *more)}) <= len(more):
        raise SettingsError("data.more_texts: a folder is named twice, or is the run's own")
    for each in more:
        _check_more_texts(each, stated, target)
    _check_manifest(folder, stated, target)
    if accepted is not None:
        accepted()
    keep = Capture(layer_ids, settings.num_laws)
    token_bytes = _token_bytes(target, keep)
    jobs = _jobs(folder, target, tokenizer, settings, token_bytes, quiet=quiet)
    texts = "\0".join(job.prompt.text for job in jobs)
    _note(folder, "prompts_sha256", hashlib.sha256(texts.encode()).hexdigest())
    size = settings.texts_per_shard
    shards = [jobs[i : i + size] for i in range(0, len(jobs), size)]
    stops = stop_tokens(target, tokenizer)
    missing = [i for i in range(len(shards)) if not shard_path(folder, i).exists()]
    if missing:
        left = [job for i in missing for job in shards[i]]
        _check_missing(folder, left, settings, token_bytes)
    with tqdm(total=len(jobs), desc="texts", unit="text", disable=quiet) as bar:
        for number, part in enumerate(shards):
            if number in missing:
                path = shard_path(folder, number)
                _make_shard(path, number, part, target, keep, settings, stops)
            bar.update(len(part))
    _note(folder, "num_shards", len(shards))
    return Corpus(folder, *more)


def corpus_is_complete(folder: Path) -> bool:
    """Tell whether `build_corpus` has finished there."""
    number = read_manifest(folder).get("num_shards")
    return number is not None and all(shard_path(folder, i).exists() for i in range(number))


@dataclasses.dataclass(frozen=True)
class _Job:
    """One text to make.

    Attributes:
        prompt: Whose.
        tokens: The prompt's.
        response: The answer's where it is given, else None.
        info: Of the text, length and place still open.
    """

    prompt: Prompt
    tokens: list[int]
    response: list[int] | None
    info: TextInfo


def _stated(
    settings: DataSettings, layer_ids: tuple[int, ...], target: PreTrainedModel
) -> dict[str, Any]:
    """Return what a manifest says of how texts are made."""
    made = {k: v for k, v in vars(settings).items() if k != "more_texts"}
    return {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in made.items()},
        "layer_ids": list(layer_ids),
        "target": target_digest(target),
    }


def _found(folder: Path, target: PreTrainedModel) -> dict[str, Any]:
    """Return a folder's manifest; where it names this target in the former way, in today's."""
    found = read_manifest(folder)
    # Manifests once had this hash; it takes a fine-tune with its base's embedding for the base.
    if found.get("target") == embedding_digest(target):
        found["target"] = target_digest(target)
    return found


def _check_more_texts(folder: Path, stated: dict[str, Any], target: PreTrainedModel) -> None:
    """Refuse a folder whose texts cannot stand beside those of this run."""
    if not corpus_is_complete(folder):
        raise SettingsError(f"data.more_texts: {folder} does not hold the whole texts of a run")
    found = _found(folder, target)
    if found.get("target") != stated["target"]:
        raise SettingsError(
            f"data.more_texts: {folder} was made with another target: leave the folder out"
        )
    # Features and laws are stacked; a prompt held out here must not be learnt there.
    for key in ("layer_ids", "num_laws", "held_out_share"):
        if found.get(key) != stated[key]:
            raise SettingsError(
                f"data.more_texts: {folder} was made with {key} {found.get(key)!r}, and this run "
                f"has {stated[key]!r}: leave the folder out, or set the same"
            )


def _check_manifest(folder: Path, stated: dict[str, Any], target: PreTrainedModel) -> None:
    """Note how the texts are made, or refuse a folder whose texts were made otherwise."""
    path = manifest_path(folder)
    # A run that failed before it made anything binds nobody.
    has_texts = shard_path(folder, 0).exists() or auto_file(folder).exists()
    if not path.exists() or not has_texts:
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps(stated, indent=1), encoding="utf-8")
        return
    found = _found(folder, target)
    differing = [key for key in stated if found.get(key) != stated[key]]
    if differing:
        raise SettingsError(
            f"{folder} holds texts made with another {', '.join(differing)}: restore these "
            "settings, or name another folder by --data"
        )


def _note(folder: Path, key: str, value: Any) -> None:
    """Add to what the manifest says, or refuse a folder that was made of other prompts.

    Nothing is written where it says so already: several processes may read a finished folder.
    """
    found = read_manifest(folder)
    if found.get(key, value) != value:
        raise SettingsError(
            f"{folder} holds texts of other prompts ({key} is {found[key]}, now {value}): restore "
            "the prompt files, or name another folder by --data"
        )
    if key not in found:
        text = json.dumps(found | {key: value}, indent=1)
        with whole_file(manifest_path(folder)) as unfinished:
            unfinished.write_text(text, encoding="utf-8")


def _jobs(
    folder: Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    token_bytes: int,
    *,
    quiet: bool,
) -> list[_Job]:
    """Return all texts to make, each prompt once, in an order that mixes the kinds."""
    sources = [parse_source(each) for each in settings.prompts]
    found = {source: read_prompts(source) for source in sources if source.name != AUTO}
    _check_auto_space(folder, sources, found, settings, token_bytes)
    prompts: dict[str, Prompt] = {}
    for source in sources:
        if source.name == AUTO:
            limit = source.limit or 0
            made = auto_prompts(folder, target, tokenizer, settings, limit, quiet=quiet)
        else:
            made = found[source]
        for prompt in made:
            prompts.setdefault(prompt.text, prompt)
    jobs = [_job(prompt, tokenizer, settings) for prompt in prompts.values()]
    fitting = [job for job in jobs if 1 <= len(job.tokens) <= settings.max_prompt_tokens]
    if len(fitting) < len(jobs):
        log.info("%d prompts left out: longer than the limit", len(jobs) - len(fitting))
    if not any(job.info.held_out for job in fitting):
        raise SettingsError(
            f"data.held_out_share {settings.held_out_share} of {len(fitting)} prompts holds none "
            "out: raise it, or give more prompts"
        )
    return sorted(fitting, key=lambda job: share_of(job.prompt.text, "order"))


def _job(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> _Job:
    tokens = prompt_tokens(prompt.text, tokenizer, settings)
    greedy = share_of(prompt.text, "greedy") < settings.greedy_share
    held_out = share_of(prompt.text, "held out") < settings.held_out_share
    temperature = 0.0 if greedy else settings.temperature
    response = None
    if prompt.response is not None:
        response = list(tokenizer(prompt.response, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None:
            response.append(tokenizer.eos_token_id)
    info = TextInfo(0, 0, 0, len(tokens), temperature, held_out, prompt.kind)
    return _Job(prompt, tokens, response, info)


def _token_bytes(target: PreTrainedModel, keep: Capture) -> int:
    """Return what a token of a text takes on disk."""
    # The token, its features in bfloat16, and for each likely token 4 bytes of id and 2 of law.
    return 4 + 2 * len(keep.layer_ids) * embedding_of(target).shape[1] + 6 * keep.num_laws


def _check_auto_space(
    folder: Path,
    sources: list[Source],
    found: dict[Source, list[Prompt]],
    settings: DataSettings,
    token_bytes: int,
) -> None:
    """Refuse a disk without room for the answers, before prompts are made up for hours."""
    number = max((source.limit or 0 for source in sources if source.name == AUTO), default=0)
    if number <= len(known_auto_prompts(folder)):
        return
    number += sum(each.response is None for prompts in found.values() for each in prompts)
    _check_space(folder, number, number * settings.max_new_tokens, token_bytes)


def _check_missing(
    folder: Path, jobs: list[_Job], settings: DataSettings, token_bytes: int
) -> None:
    """Log what texts still to make can need at most, or refuse a disk that has less."""
    most = settings.max_new_tokens
    answers = [most if job.response is None else min(most, len(job.response)) for job in jobs]
    tokens = sum(answers) + sum(len(job.tokens) for job in jobs)
    free = _check_space(folder, len(jobs), tokens, token_bytes)
    log.info(
        "%d texts to make: at most %d tokens, %.1f GB in %s, which has %.1f GB free",
        len(jobs),
        tokens,
        tokens * token_bytes / 1e9,
        folder,
        free / 1e9,
    )


def _check_space(folder: Path, number: int, tokens: int, token_bytes: int) -> int:
    """Return the free bytes of a folder's disk, or refuse one with less than some texts need."""
    needed, free = tokens * token_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise SettingsError(
            f"{folder}: the texts to make need up to {needed / 1e9:.1f} GB ({number} texts, "
            f"{tokens} tokens at most), and {free / 1e9:.1f} GB are free there: give fewer "
            "prompts, lower data.max_new_tokens, or name a folder on another disk by --data"
        )
    return free


def _make_shard(
    path: Path,
    number: int,
    jobs: list[_Job],
    target: PreTrainedModel,
    keep: Capture,
    settings: DataSettings,
    stops: frozenset[int],
) -> None:
    """Answer one shard's prompts, those of like length together, and write it."""
    generator = generator_for(settings.seed, 2, number)
    made: dict[int, Text] = {}
    # Python's sort is stable, so that the batches are the same in every run.
    order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].tokens))
    given = [i for i in order if jobs[i].response is not None]
    asked = [i for i in order if jobs[i].response is None]
    for i in given:
        response = (jobs[i].response or [])[: settings.max_new_tokens]
        made[i] = capture(target, jobs[i].tokens + response, len(jobs[i].tokens), keep)
    for first in range(0, len(asked), settings.batch_size):
        part = asked[first : first + settings.batch_size]
        texts = answer(
            target,
            [jobs[i].tokens for i in part],
            [jobs[i].info.temperature for i in part],
            keep,
            max_new_tokens=settings.max_new_tokens,
            top_k=settings.top_k,
            stop_ids=stops,
            generator=generator,
        )
        made.update(zip(part, texts, strict=True))
    # A block needs an anchor and a label.
    usable = [i for i in range(len(jobs)) if len(made[i].tokens) - made[i].start >= 2]
    infos, row = [], 0
    for i in usable:
        length = len(made[i].tokens)
        infos.append(jobs[i].info._replace(shard=number, first=row, length=length))
        row += length
    write_shard(path, [made[i] for i in usable], infos)
