# SPDX-License-Identifier: Apache-2.0
"""Custom logit processors, each row of a block with the request as it stands there.

SGLang hands a processor the request itself (`custom_params["__req__"]`), whose output the host
knows one step late and without the block's tokens. A view of the request completes it.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.utils.common import async_d2h, async_h2d

from sglang_dflash.verify.rows import Rows

__all__ = ["CustomProcessors", "needs_history"]

_REQUEST = "__req__"


class RequestAt:
    """A request with the output it has at one row of a block; all else is the request's own."""

    def __init__(self, request: Req, output_ids: list[int]) -> None:
        self._request = request
        self.output_ids = array("q", output_ids)  # the type that SGLang's own processors add up

    def __getattr__(self, name: str) -> Any:
        """Return the request's attribute."""
        return getattr(self._request, name)


class _Step(NamedTuple):
    """What the latest step committed, on its way to the host."""

    rids: list[str]
    tokens: torch.Tensor  # [n, W]
    num_committed: torch.Tensor  # [n]
    num_output: torch.Tensor  # [n], tokens in the output after the step
    copied: Any  # a device event, None on the host


def needs_history(info: SamplingBatchInfo) -> bool:
    """Return whether a processor of the batch is handed its request."""
    return info.has_custom_logit_processor and any(
        isinstance(params, dict) and _REQUEST in params for params in info.custom_params
    )


class CustomProcessors:
    """Applies a batch's processors, and knows what the host will only learn of later."""

    def __init__(self) -> None:
        self._latest: _Step | None = None

    def remember(
        self,
        batch: ScheduleBatch,
        tokens: torch.Tensor,
        num_committed: torch.Tensor,
        num_output: torch.Tensor,
    ) -> None:
        """Start copying a step's tokens to the host; the next step's processors may want them.

        Args:
            batch: the n requests.
            tokens: [n, W] int64, each request's committed tokens first.
            num_committed: [n] int32 or int64.
            num_output: [n] int64, tokens in the output, these included.
        """
        on_host = [async_d2h(values) for values in (tokens, num_committed, num_output)]
        copied = None
        if tokens.device.type != "cpu":
            copied = torch.get_device_module(tokens.device).Event()
            copied.record()
        self._latest = _Step([request.rid for request in batch.reqs], *on_host, copied)

    def complete(self, batch: ScheduleBatch) -> None:
        """Hand the processors of a mixed chunk requests whose output is complete."""
        outputs = self._outputs_sync(batch.reqs, batch.decoding_reqs)
        batch.sampling_info.custom_params = [
            _at(params, output)
            for params, output in zip(batch.sampling_info.custom_params, outputs, strict=True)
        ]

    def apply(
        self, batch: ScheduleBatch, out: torch.Tensor, rows: Rows, chain: torch.Tensor | None
    ) -> None:
        """Run the processors on every row.

        Args:
            batch: the n requests.
            out: [M, V] logits, changed in place.
            rows: which rows they are.
            chain: [n, W] int64 on the host, anchors and proposals, W the rows of the widest; None
                where no processor is handed its request.
        """
        info = batch.sampling_info
        params = _repeated(info.custom_params, rows)
        if chain is not None:
            outputs, blocks = self._outputs_sync(batch.reqs, batch.reqs), chain.tolist()
            params = [
                _at(own, output + proposals[:j])
                for own, output, (_, *proposals), width in zip(
                    info.custom_params, outputs, blocks, rows.widths_cpu, strict=True
                )
                for j in range(width)
            ]
        apply_custom_logit_processor(out, _of_rows(info, params, rows))

    def _outputs_sync(self, requests: Sequence[Req], running: Sequence[Req]) -> list[list[int]]:
        """Return each request's output, the anchor included; waits for the latest step's copy.

        Those not `running` are prefilled: what they wrote before a retraction was dropped is gone.
        """
        late: dict[str, list[int]] = {}
        if self._latest is not None:
            if self._latest.copied is not None:
                self._latest.copied.synchronize()
            late = _missing(self._latest, running)
        return [[*request.output_ids, *late.get(request.rid, ())] for request in requests]


def _missing(step: _Step, requests: Sequence[Req]) -> dict[str, list[int]]:
    known = {request.rid: len(request.output_ids) for request in requests}
    values = (step.tokens.tolist(), step.num_committed.tolist(), step.num_output.tolist())
    return {
        rid: tokens[:count][count - max(0, total - known[rid]) :]
        for rid, tokens, count, total in zip(step.rids, *values, strict=True)
        if rid in known
    }


def _at(params: Any, output_ids: list[int]) -> Any:
    if not isinstance(params, dict) or _REQUEST not in params:
        return params
    return {**params, _REQUEST: RequestAt(params[_REQUEST], output_ids)}


def _repeated(params: list[Any], rows: Rows) -> list[Any]:
    return [own for own, width in zip(params, rows.widths_cpu, strict=True) for _ in range(width)]


def _of_rows(info: SamplingBatchInfo, params: list[Any], rows: Rows) -> SamplingBatchInfo:
    """Return the processors of M rows."""
    ends = list(itertools.accumulate(rows.widths_cpu))
    entries = {}
    for key, entry in info.custom_logit_processor.items():
        spans = (range(ends[row] - rows.widths_cpu[row], ends[row]) for row in entry.rows)
        of_rows = list(itertools.chain.from_iterable(spans))
        indices = async_h2d(of_rows, dtype=torch.int64, device=rows.request.device)
        entries[key] = ProcessorEntry(entry.processor, of_rows, indices)
    return dataclasses.replace(
        info,
        temperatures=rows.each(info.temperatures),
        custom_params=params,
        custom_logit_processor=entries,
    )
