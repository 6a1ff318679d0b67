# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that streams as OpenAI's completions do; its words follow from the prompt."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__: list[str] = []

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("--port", type=int, required=True)
ARGUMENTS.add_argument("--token-ms", type=float, default=1, help="time between two words")
ARGUMENTS.add_argument("--die-at", type=int, help="end the process at this request")
ARGUMENTS.add_argument("--die-once", help="... unless this file exists; make it")
ARGUMENTS.add_argument("--events", help="add a line to this file at the start and at each request")
ARGUMENTS.add_argument("--can-flush", action="store_true", help="as vLLM in development mode")
ARGUMENTS.add_argument("--no-start", action="store_true", help="end at once with a message")


class Handler(BaseHTTPRequestHandler):
    """Answers /v1/models and /v1/completions."""

    options: argparse.Namespace
    served = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(b'{"data": []}')

    def do_POST(self) -> None:
        self.note("asked")
        if self.path == "/reset_prefix_cache" and self.options.can_flush:
            self._begin("application/json")
            return
        if self.path != "/v1/completions":
            self.send_error(404)
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._maybe_die()
        self._begin("text/event-stream")
        for number in range(body["max_tokens"]):
            time.sleep(self.options.token_ms / 1000)
            text = f"{sum(body['prompt']) + number} "
            chunk = {"choices": [{"text": text}], "usage": {"completion_tokens": number + 1}}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    @classmethod
    def note(cls, event: str) -> None:
        """Write down what happened, if asked to."""
        if cls.options.events is not None:
            with open(cls.options.events, "a") as events:
                events.write(f"{cls.options.port} {event}\n")

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _maybe_die(self) -> None:
        with self.lock:
            Handler.served += 1
            if Handler.served != self.options.die_at:
                return
        once = self.options.die_once
        if once is not None:
            if os.path.exists(once):
                return
            open(once, "w").close()
        sys.stdout.write("toy: out of memory\n")
        sys.stdout.flush()
        os._exit(7)


def main() -> None:
    Handler.options = ARGUMENTS.parse_args()
    if Handler.options.no_start:
        raise SystemExit("toy: no such model")
    Handler.note("started")
    ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
