# SPDX-License-Identifier: Apache-2.0
"""How made-up requests are sampled."""

from __future__ import annotations

import torch

from sglang_dflash.draft.proposer import Sampling

__all__ = ["TOP_K_ALL", "sampling"]

TOP_K_ALL = 1 << 30


def sampling(n: int, **changes: torch.Tensor) -> Sampling:
    """Requests at temperature 1, nothing cut, unseeded."""
    return Sampling(
        temperatures=torch.ones(n, 1),
        top_ks=torch.full((n,), TOP_K_ALL),
        top_ps=torch.ones(n),
    )._replace(**changes)
