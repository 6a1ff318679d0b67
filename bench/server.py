# SPDX-License-Identifier: Apache-2.0
"""A server process: started, waited for, watched, and taken down with all its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import psutil
import requests

from bench.commands import Command
from bench.errors import BenchError, ServerDied

__all__ = ["Server", "free_port", "require_free"]

LOG_TAIL_LINES = 30
STOP_S = 20
PR_SET_PDEATHSIG = 1


class Server:
    """One server under test; a context manager that takes it down."""

    def __init__(self, name: str, command: Command, port: int, log: Path, *, sglang: bool) -> None:
        """Start the process; `wait_ready` waits for it.

        Args:
            name: The engine's name.
            command: What to run.
            port: Where it will listen, on this machine.
            log: Takes all that it prints.
            sglang: Whether it has SGLang's API beside OpenAI's.

        Raises:
            BenchError: the port is taken, or there is no such program.
        """
        require_free(port, name)
        self.name, self.log, self.sglang = name, log, sglang
        self.url = f"http://127.0.0.1:{port}"
        self._stopped = False
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            # a killed sweep must not leave servers that burn the machine; Linux only
            if hasattr(libc, "prctl"):
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    command.words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    env={**os.environ, **command.env}, start_new_session=True,
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - one libc call, no lock
                )  # fmt: skip
        except OSError as error:
            raise BenchError(f"engine {name}: cannot run {command.words[0]}: {error}") from error

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            ServerDied: it ended, or is not there in time; with its log's tail.
        """
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            self.require_alive()
            if time.monotonic() > deadline:
                raise ServerDied(f"{self.name}: no answer within {timeout_s:g} s\n{self.tail()}")
            time.sleep(0.5)

    def require_alive(self) -> None:
        """Raise ServerDied where the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServerDied(f"{self.name}: the server ended with exit code {code}\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])

    def memory_bytes(self) -> tuple[int, str]:
        """Return what the server holds now, and of what kind: "gpu", or "rss" of its processes.

        Shared pages count once for each process that maps them.
        """
        pids = {self._process.pid}
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    pids.add(process.pid)
                    total += process.memory_info().rss
        on_gpu = _gpu_bytes(pids)
        return (on_gpu, "gpu") if on_gpu else (total, "rss")

    def stop(self) -> None:
        """End the server as Ctrl-C would, then all that is left of it."""
        if self._stopped:
            return
        self._stopped = True  # its id may be another's soon
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        path = "/health" if self.sglang else "/v1/models"
        with contextlib.suppress(requests.RequestException):
            return requests.get(self.url + path, timeout=10).status_code == 200
        return False


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def require_free(port: int, name: str) -> None:
    """Raise BenchError where `port` is taken; `name` is who wants it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise BenchError(
                f"engine {name}: port {port} is in use ({error.strerror}); set servers.port to "
                "another, or leave it out for free ones"
            ) from error


def _gpu_bytes(pids: set[int]) -> int:
    """Return the GPU memory of these processes; 0 where no GPU or no right to ask."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    rows = (line.split(",") for line in text.splitlines() if line.count(",") == 1)
    return sum(
        int(used) * 2**20 for pid, used in rows if used.strip().isdigit() and int(pid) in pids
    )
