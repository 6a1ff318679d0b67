# SPDX-License-Identifier: Apache-2.0
"""The child of `EngineProcess`: `python -m sglang_dflash.demo.serve FD` answers on that pipe."""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from sglang_dflash.demo.engine import Answer, Placement

if TYPE_CHECKING:
    import sglang

__all__ = ["main"]


def main(file_descriptor: int) -> None:
    """Start the engine that the first message describes, then answer until the pipe closes."""
    import sglang  # noqa: F401 - slow, and the parent may be gone by the time it is done

    pipe = Connection(file_descriptor)
    try:
        options = pipe.recv()
    except EOFError:
        return
    try:
        engine, placement = _start(options)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("ok", placement))
    answers = {"generate": _generate, "log_probs": _log_probs, "token_text": _token_text}
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(("ok", answers[name](engine, *arguments)))
        except ValueError as error:  # SGLang refuses the request: too long, say
            pipe.send(("refused", str(error)))
    engine.shutdown()


def _start(options: dict[str, Any]) -> tuple[sglang.Engine, Placement]:
    import sglang
    import torch

    on_cpu = not torch.accelerator.is_available()
    device = "cpu" if on_cpu else torch.accelerator.current_accelerator().type
    if options["dtype"] == "auto":
        options = {**options, "dtype": "float32" if on_cpu else "bfloat16"}
    if not on_cpu:  # two engines share it
        options = {"mem_fraction_static": 0.4, **options}
    return sglang.Engine(**options), Placement(device, options["dtype"])


def _prompt_ids(engine: sglang.Engine, prompt: str) -> list[int]:
    tokenizer = engine.tokenizer_manager.tokenizer
    if not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def _generate(engine: sglang.Engine, prompt: str, max_new_tokens: int) -> Answer:
    ids = _prompt_ids(engine, prompt)
    greedy = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    start = time.perf_counter()
    out = engine.generate(input_ids=ids, sampling_params=greedy)
    seconds = time.perf_counter() - start
    meta = out["meta_info"]
    # SGLang counts verify steps under DFLASH; the field is absent where there was none.
    steps = meta.get("spec_verify_ct", len(out["output_ids"]) - 1)
    return Answer(
        out["text"], out["output_ids"], seconds, steps, meta.get("spec_num_correct_drafts", 0)
    )


def _log_probs(
    engine: sglang.Engine, prompt: str, prefix: list[int], token_ids: list[int]
) -> list[float]:
    out = engine.generate(
        input_ids=_prompt_ids(engine, prompt) + prefix,
        sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        token_ids_logprob=token_ids,
    )
    found = out["meta_info"]["output_token_ids_logprobs"][0]
    by_id = {token_id: log_prob for log_prob, token_id, _ in found}
    return [by_id[token_id] for token_id in token_ids]


def _token_text(engine: sglang.Engine, token_ids: list[int]) -> str:
    return engine.tokenizer_manager.tokenizer.decode(token_ids)


if __name__ == "__main__":
    main(int(sys.argv[1]))
