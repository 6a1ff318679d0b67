# SPDX-License-Identifier: Apache-2.0
"""An `sgl.Engine` in a process of its own (`serve.py`), driven through a pipe.

SGLang keeps its configuration in process-wide state, so the plain and the DFLASH engine cannot
live in one process; in two they can take turns on every prompt. Each child leads a session of its
own: Ctrl-C reaches only the parent, which then takes down the child with all it has started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.demo import DemoError

__all__ = ["Answer", "EngineProcess", "Placement"]

SHUTDOWN_S, SHUTDOWN_AFTER_ERROR_S = 20, 3
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

    def __init__(
        self, name: str, options: dict[str, Any], *, on_cpu: bool, log_path: Path | None
    ) -> None:
        """Describe the engine; entering the context starts it, and `ready` waits for it.

        Args:
            name: For messages.
            options: `sgl.Engine` arguments. `dtype` "auto" becomes float32 on a CPU, where
                equal text is the point, and bfloat16 on a GPU, whose kernels want it.
            on_cpu: Hide any GPU from the child.
            log_path: Takes all output of the engine; None lets it through to the terminal.
        """
        self._name, self._options, self._log_path = name, options, log_path
        self._environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if on_cpu else None

    def __enter__(self) -> EngineProcess:
        self._pipe, theirs = multiprocessing.Pipe()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            log = self._log_path and stack.enter_context(self._log_path.open("ab"))
            self._child = subprocess.Popen(
                [sys.executable, "-m", "sglang_dflash.demo.serve", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._pipe.close()  # a child that serves reads the end of the pipe and shuts down
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(SHUTDOWN_S if error is None else SHUTDOWN_AFTER_ERROR_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def ready(self) -> Placement:
        """Wait until the engine serves; return how it runs.

        Raises:
            DemoError: it did not start; with the end of its log.
        """
        return self._ask(self._options)

    def generate(self, prompt: str, max_new_tokens: int) -> Answer:
        """Answer `prompt` greedily, as a chat's first turn where the model has a template."""
        return self._ask(("generate", prompt, max_new_tokens))

    def log_probs(self, prompt: str, prefix: list[int], token_ids: list[int]) -> list[float]:
        """Return the log-probability of each of `token_ids` after `prompt` and `prefix`."""
        return self._ask(("log_probs", prompt, prefix, token_ids))

    def token_text(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`."""
        return self._ask(("token_text", token_ids))

    def _ask(self, message: object) -> Any:
        try:
            self._pipe.send(message)
            outcome, content = self._pipe.recv()
        except (EOFError, ConnectionError):
            outcome, content = "failed", f"its process ended with exit code {self._child.wait()}"
        if outcome == "refused":
            raise DemoError(f"the {self._name} engine refuses the prompt: {content}")
        if outcome == "failed":
            raise DemoError(f"the {self._name} engine failed: {content}{self._log_tail()}")
        return content

    def _log_tail(self) -> str:
        if self._log_path is None:
            return ""
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"\n{tail}\n(--verbose shows the whole log)"
