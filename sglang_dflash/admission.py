# SPDX-License-Identifier: Apache-2.0
"""Which requests are served: what could not be exact is refused by name when it arrives."""

from __future__ import annotations

from typing import Any

__all__ = ["NO_DRAFT_UPDATE", "refusal"]

NO_DRAFT_UPDATE = (
    "selector 'draft': DFLASH's draft keeps the weights it was started with. Use 'target' or "
    "'all', or start again with another --speculative-draft-model-path."
)


def refusal(request: Any, *, deterministic: bool) -> str | None:
    """Return why DFLASH cannot serve this request exactly, or None when it can.

    Args:
        request: SGLang's `Req` after its sampling parameters were normalised: greedy decoding is
            `top_k == 1` there, which `temperature=0` became.
        deterministic: whether the server draws with seeds (--enable-deterministic-inference).
    """
    if not request.origin_input_ids:  # SGLang would draw from its neighbour's logits, or die
        return "The prompt is empty. Send at least one token, such as the model's BOS."
    params = request.sampling_params
    asked = {
        "return_hidden_states": request.return_hidden_states,
        "return_sampling_mask": request.return_sampling_mask,
    }
    names = [name for name, wanted in asked.items() if wanted]
    if names:
        return (
            f"DFLASH does not serve {', '.join(names)}. Send the request without, or serve the "
            "model without --speculative-algorithm."
        )
    # SGLang's sampler would stop the server, for a greedy request in a mixed batch too.
    if deterministic and params.min_p > 0:
        return (
            f"min_p={params.min_p:g}: SGLang has no seeded draw with min_p, and this server draws "
            "with seeds. Send top_p instead, or serve without --enable-deterministic-inference."
        )
    return None
