# SPDX-License-Identifier: Apache-2.0
"""An `sgl.Engine` in a process of its own, driven through a pipe.

SGLang keeps its configuration in process-wide state, so the plain and the DFLASH engine cannot
live in one process; in two they can take turns on every prompt. Each child leads a session of its
own: Ctrl-C reaches only the parent, which then takes down the child with all it has started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dflash.demo import DemoError

if TYPE_CHECKING:
    import sglang

__all__ = ["Answer", "EngineProcess", "Placement"]

SHUTDOWN_S = 20
LOG_TAIL_LINES = 25


class Answer(NamedTuple):
    """What one request gave.

    Attributes:
        text: The answer, detokenized.
        token_ids: The answer's tokens, a final end token included.
        seconds: From the call to the last token, prefill included.
        num_steps: Target forwards after prefill: verify steps under DFLASH, else one a token.
        num_accepted: Proposals accepted over all steps, also those that a stop then cut off.
    """

    text: str
    token_ids: list[int]
    seconds: float
    num_steps: int
    num_accepted: int


class Placement(NamedTuple):
    """Where and how an engine runs, as it resolved it: `device`, `dtype`."""

    device: str
    dtype: str


class EngineProcess:
    """One engine; a context manager that starts it and takes it down."""

    def __init__(self, name: str, options: dict[str, Any], log_path: Path | None) -> None:
        """Start the child; `ready` waits for it.

        Args:
            name: For messages.
            options: `sgl.Engine` arguments. `dtype` "auto" becomes float32 on a CPU, where
                equal text is the point, and bfloat16 on a GPU, whose kernels want it.
            log_path: Takes all output of the engine; None lets it through to the terminal.
        """
        self._name, self._log_path = name, log_path
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, options, log_path))
        self._child.start()
        theirs.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the child reads the end of the pipe and shuts down
        self._child.join(SHUTDOWN_S)
        with contextlib.suppress(ProcessLookupError):  # gone, or too young to lead a group
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.kill()
        self._child.join()

    def ready(self) -> Placement:
        """Wait until the engine serves; return how it runs.

        Raises:
            DemoError: it did not start; with the end of its log.
        """
        return self._receive()

    def generate(self, prompt: str, max_new_tokens: int) -> Answer:
        """Answer `prompt` greedily, as a chat's first turn where the model has a template."""
        return self._ask("answer", prompt, max_new_tokens)

    def log_probs(self, prompt: str, prefix: list[int], token_ids: list[int]) -> list[float]:
        """Return the log-probability of each of `token_ids` after `prompt` and `prefix`."""
        return self._ask("log_probs", prompt, prefix, token_ids)

    def token_text(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`."""
        return self._ask("token_text", token_ids)

    def _ask(self, *message: object) -> Any:
        self._pipe.send(message)
        return self._receive()

    def _receive(self) -> Any:
        try:
            failed, content = self._pipe.recv()
        except EOFError:
            self._child.join(SHUTDOWN_S)
            failed, content = True, f"its process ended with exit code {self._child.exitcode}"
        if failed:
            raise DemoError(f"the {self._name} engine failed: {content}{self._log_tail()}")
        return content

    def _log_tail(self) -> str:
        if self._log_path is None or not self._log_path.exists():
            return ""
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"\n{tail}\n(--verbose shows the whole log)"


def _serve(pipe: Connection, options: dict[str, Any], log_path: Path | None) -> None:
    """The child: start the engine, answer until the pipe closes."""
    os.setsid()
    if log_path is not None:
        _send_output_to(log_path)
    try:
        engine, placement = _start(options)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        pipe.send((True, f"{type(error).__name__}: {error}"))
        return
    pipe.send((False, placement))
    handlers = {"answer": _answer, "log_probs": _log_probs, "token_text": _token_text}
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = pipe.recv()
            pipe.send((False, handlers[name](engine, *arguments)))
    engine.shutdown()


def _send_output_to(log_path: Path) -> None:
    """Point this process's stdout and stderr, and its children's, to a file."""
    file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def _start(options: dict[str, Any]) -> tuple[sglang.Engine, Placement]:
    import sglang
    import torch

    on_gpu = options.get("device") != "cpu" and torch.cuda.is_available()
    if options["dtype"] == "auto":
        options = {**options, "dtype": "bfloat16" if on_gpu else "float32"}
    if on_gpu:  # two engines share it
        options = {"mem_fraction_static": 0.4, **options}
    engine = sglang.Engine(**options)
    return engine, Placement(str(engine.server_args.device), options["dtype"])


def _prompt_ids(engine: sglang.Engine, prompt: str) -> list[int]:
    tokenizer = engine.tokenizer_manager.tokenizer
    if not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def _answer(engine: sglang.Engine, prompt: str, max_new_tokens: int) -> Answer:
    ids = _prompt_ids(engine, prompt)
    greedy = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    start = time.perf_counter()
    out = engine.generate(input_ids=ids, sampling_params=greedy)
    seconds = time.perf_counter() - start
    meta = out["meta_info"]
    # Under DFLASH SGLang counts verify steps; they are absent where prefill's token was the last.
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
