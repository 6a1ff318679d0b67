# SPDX-License-Identifier: Apache-2.0
"""Which requests are served: what could not be exact is refused by name when it arrives."""

from __future__ import annotations

from typing import Any

__all__ = ["refusal"]

_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def refusal(request: Any) -> str | None:
    """Return why DFLASH cannot serve this request exactly, or None when it can.

    Args:
        request: SGLang's `Req` after its sampling parameters were normalised: greedy decoding is
            `top_k == 1` there, which `temperature=0` became.
    """
    names = _unserved(request)
    if not names:
        return None
    return (
        f"DFLASH serves greedy requests, and this one asks for {', '.join(names)}. Send "
        "temperature 0 without them, or serve the model without --speculative-algorithm."
    )


def _unserved(request: Any) -> list[str]:
    params = request.sampling_params
    names = []
    if params.top_k != 1:
        names.append(f"temperature={params.temperature:g}")
    names += [
        f"{name}={getattr(params, name):g}"
        for name, off in _PENALTIES.items()
        if getattr(params, name) != off
    ]
    if params.min_new_tokens:
        names.append(f"min_new_tokens={params.min_new_tokens}")
    if params.logit_bias:
        names.append("logit_bias")
    names += [name for name in _GRAMMARS if getattr(params, name)]
    if (params.beam_width or 1) > 1:
        names.append(f"beam_width={params.beam_width}")
    if request.custom_logit_processor:
        names.append("custom_logit_processor")
    if request.return_logprob:
        names.append("logprobs")
    if request.return_hidden_states:
        names.append("return_hidden_states")
    if request.return_sampling_mask:
        names.append("return_sampling_mask")
    return names
