# SPDX-License-Identifier: Apache-2.0
"""What is kept of the target's passes over a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Capture", "Laws", "Text", "assembled", "captured_features", "likely_tokens"]


@dataclass(frozen=True)
class Capture:
    """What to keep of the target's passes.

    Attributes:
        layer_ids: Captured layers; none keeps no features.
        num_laws: Most likely next tokens kept a position; 0 keeps none.
    """

    layer_ids: tuple[int, ...] = ()
    num_laws: int = 0

    @property
    def hidden_states(self) -> list[int] | bool:
        """What transformers is asked for as `output_hidden_states`."""
        return list(self.layer_ids) or False


class Text(NamedTuple):
    """A prompt with its answer.

    Attributes:
        tokens: [T] int32.
        start: Position of the answer's first token.
        features: [T, K*H] bfloat16; the last token's are 0, for the target never read it.
        law_ids: [T, k] int32, likely tokens after each; 0 before `start - 1` and in the last row.
        law_logprobs: [T, k] float16, their log-probabilities at temperature 1.
    """

    tokens: torch.Tensor
    start: int
    features: torch.Tensor
    law_ids: torch.Tensor
    law_logprobs: torch.Tensor


class Laws(NamedTuple):
    """What the target gave to likely tokens: ids [m, k] int32, logprobs [m, k] float16."""

    ids: torch.Tensor
    logprobs: torch.Tensor

    def rows(self, rows: slice) -> Laws:
        """Return some rows."""
        return Laws(self.ids[rows], self.logprobs[rows])


def likely_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_laws: int) -> Laws:
    """Return the most likely tokens after each row, the given ones always among them.

    Args:
        logits: [m, V] float.
        tokens: [m] int64, what the text has there.
        num_laws: k, tokens to keep.
    """
    logits = logits.float()
    if num_laws == 0:
        empty = torch.empty((len(logits), 0))
        return Laws(empty.to(torch.int32), empty.to(torch.float16))
    values, ids = logits.topk(min(num_laws, logits.shape[-1]), dim=-1)
    missing = (ids != tokens[:, None]).all(-1)
    ids[missing, -1] = tokens[missing]
    values[missing, -1] = logits.gather(1, tokens[:, None])[missing, 0]
    logprobs = values - logits.logsumexp(-1, keepdim=True)
    return Laws(ids.to("cpu", torch.int32), logprobs.to("cpu", torch.float16))


def captured_features(
    hidden_states: Sequence[torch.Tensor] | None, keep: Capture, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the captured layers' outputs side by side, [n, T, K*H] bfloat16.

    Args:
        hidden_states: What a target gave for `keep.hidden_states`: of most targets one entry a
            layer, None for those not asked for. Some know no list and give everything, the
            embeddings first.
        keep: Which layers; never the last one.
        shape: n and T, for where nothing is captured.
    """
    if hidden_states is None:
        return torch.empty((*shape, 0), dtype=torch.bfloat16)
    first = 0 if hidden_states[-1] is None else 1
    found = [hidden_states[i + first] for i in keep.layer_ids]
    return torch.cat(found, dim=-1).to(torch.bfloat16)


def assembled(tokens: torch.Tensor, start: int, features: torch.Tensor, laws: Laws) -> Text:
    """Return a text, what was not captured filled with 0.

    Args:
        tokens: [T] int32.
        start: Position of the answer's first token.
        features: [T - 1, K*H], of the tokens that the target read.
        laws: T - start rows, one a token of the answer.
    """

    def placed(rows: torch.Tensor, first: int) -> torch.Tensor:
        out = rows.new_zeros((len(tokens), rows.shape[1]))
        out[first : first + len(rows)] = rows
        return out

    return Text(
        tokens,
        start,
        placed(features, 0),
        placed(laws.ids, start - 1),
        placed(laws.logprobs, start - 1),
    )
