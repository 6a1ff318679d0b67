# SPDX-License-Identifier: Apache-2.0
"""The loop: batches by number, an optimizer, figures on held-out texts, a state to resume from."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sglang_dflash.training.batches import Order, draw_batch
from sglang_dflash.training.checkpoint import (
    ALL_BATCHES,
    Resumed,
    export_draft,
    known_tokens,
    load_state,
    save_state,
)
from sglang_dflash.training.history import History
from sglang_dflash.training.measure import measure
from sglang_dflash.training.objective import BlockLoss
from sglang_dflash.training.optimizers import Optimizers

if TYPE_CHECKING:
    from sglang_dflash.training.model import BlockDraft
    from sglang_dflash.training.ranks import Rank
    from sglang_dflash.training.settings import Settings
    from sglang_dflash.training.shards import Corpus

__all__ = ["Trainer", "learning_rate"]

_LEARNT_TEXTS = 16  # enough to tell a draft that knows its texts by heart


class Trainer:
    """One run: what it needs, and where it stands."""

    def __init__(
        self,
        draft: BlockDraft,
        embedding: torch.Tensor,
        head: torch.Tensor,
        corpus: Corpus,
        settings: Settings,
        config: dict[str, Any],
        rank: Rank,
    ) -> None:
        """Gather the parts.

        Args:
            draft: Float32; it is trained in place.
            embedding: [V, H], the target's, on this process's device.
            head: [V, H], the target's, there too.
            corpus: The texts.
            settings: Of the run.
            config: The draft's config.json.
            rank: This process.
        """
        self._draft = draft.to(rank.device)
        self._settings = settings
        self._config = config
        self._rank = rank
        self._corpus = corpus
        train = settings.train
        seen = corpus.vocabulary(corpus.split(held_out=False))
        vocabulary = seen.to(rank.device) if train.softmax_vocabulary == "seen" else None
        self._tokens = known_tokens(seen, settings.draft.init_from_draft)
        self._head = head
        self._loss = BlockLoss(self._draft, embedding, head, train, vocabulary)
        self._optimizer = Optimizers(self._draft.named_parameters(), train)
        self._order = Order(corpus, train.texts_per_batch, train.seed)
        self._measured = {
            "held_out": corpus.split(held_out=True)[: train.eval_texts],
            "learnt": corpus.split(held_out=False)[: min(train.eval_texts, _LEARNT_TEXTS)],
        }

    def run(
        self,
        folder: Path,
        out: Path,
        *,
        resume: bool = False,
        quiet: bool = False,
        accepted: Callable[[], None] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Train to the end; leave the draft in `out`, and return the figures.

        Only the first process writes, shows and returns anything.

        Args:
            folder: Of the run's state and history.
            out: Of the draft; it is written with every state.
            resume: Whether to go on from the state in `folder`.
            quiet: No progress bar.
            accepted: Called once nothing refuses the run any more, before the first step.
            after_step: Called with the number of steps done.

        Raises:
            SettingsError: the state in `folder` is of a run with other settings or texts.
        """
        train = self._settings.train
        identity = self._identity()
        done = Resumed(0, {"loss": 0.0, "count": 0})
        if resume:
            done = load_state(folder, self._draft, self._optimizer, identity)
        if accepted is not None:
            accepted()
        model = self._parallel_model()
        history = None
        if self._rank.is_first:
            history = History(folder, train.steps, done.step, quiet=quiet)
        metrics, began = dict(done.metrics), time.monotonic()
        for step in range(done.step, train.steps):
            loss = self._step(model, step)
            metrics = {"loss": metrics["loss"] + loss, "count": metrics["count"] + 1}
            if history is not None:
                history.step(loss)
            if history is not None and _is_due(step + 1, train.eval_every, train.steps):
                seconds = time.monotonic() - began
                history.write(self._figures(step + 1, metrics, seconds))
                metrics = {"loss": 0.0, "count": 0}
            if self._rank.is_first and _is_due(step + 1, train.checkpoint_every, train.steps):
                place = Resumed(step + 1, metrics)
                save_state(folder, self._draft, self._optimizer, place, identity)
                export_draft(out, self._draft, self._config, self._tokens)
            if after_step is not None:
                after_step(step + 1)
        if history is None:
            return []
        history.close()
        return history.entries()

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must have alike to end in the same weights."""
        identity = self._settings.as_dict()
        for free in ("checkpoint_every", "eval_every", "eval_texts"):
            del identity["train"][free]
        if not identity["data"]["more_texts"]:
            del identity["data"]["more_texts"]  # runs are resumed that began before it was there
        identity["data"]["prompts_sha256"] = self._corpus.prompts_sha256
        identity["train"][ALL_BATCHES] = self._settings.train.accumulate * self._rank.count
        return identity | {"config": self._config}

    def _parallel_model(self) -> torch.nn.Module:
        if self._rank.count == 1:
            return self._loss
        return DistributedDataParallel(self._loss, broadcast_buffers=False)

    def _step(self, model: torch.nn.Module, step: int) -> float:
        """Do one optimizer step; return its loss, the mean over all processes."""
        train = self._settings.train
        self._optimizer.set_rate(
            learning_rate(step, train.steps, train.learning_rate, train.warmup_share)
        )
        self._optimizer.zero_grad()
        total = 0.0
        for part in range(train.accumulate):
            place = (step * train.accumulate + part) * self._rank.count + self._rank.number
            batch = draw_batch(
                self._corpus, self._order, place, self._config["block_size"], train
            ).to(self._rank.device)
            is_last = part == train.accumulate - 1
            waits = self._rank.count > 1 and not is_last
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = model(batch).loss / train.accumulate
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._draft.parameters(), train.clip_norm)
        self._optimizer.step()
        mean = self._rank.sum(torch.tensor([total], dtype=torch.float64)) / self._rank.count
        return float(mean)

    def _figures(self, step: int, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
        block_size = self._config["block_size"]
        measured = {
            name: dataclasses.asdict(
                measure(self._loss, self._head, self._corpus, numbers, block_size)
            )
            for name, numbers in self._measured.items()
        }
        train = self._settings.train
        return {
            "step": step,
            "loss": metrics["loss"] / metrics["count"],
            "learning_rate": learning_rate(
                step - 1, train.steps, train.learning_rate, train.warmup_share
            ),
            **measured,
            "seconds": round(seconds, 1),
        }


def learning_rate(step: int, steps: int, peak: float, warmup_share: float) -> float:
    """Return the rate of a step: a straight rise to the peak, then a cosine to 0.

    Args:
        step: From 0.
        steps: All.
        peak: The highest rate.
        warmup_share: Share of the steps that rise.
    """
    rising = max(1, round(steps * warmup_share))
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def _is_due(done: int, every: int, steps: int) -> bool:
    return done % every == 0 or done == steps
