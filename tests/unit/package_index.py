# SPDX-License-Identifier: Apache-2.0
"""A package index on 127.0.0.1 that holds one wheel, and can cut or refuse its transfers."""

from __future__ import annotations

import hashlib
import io
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

__all__ = ["PackageIndex", "make_wheel"]

WHEEL = "tiny_target-1.0-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: tiny-target\nVersion: 1.0\n"


def make_wheel(members: dict[str, bytes]) -> bytes:
    """Return the bytes of an installable wheel `tiny-target` 1.0 that holds `members`."""
    info = "tiny_target-1.0.dist-info"
    tag = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{info}/METADATA": METADATA, f"{info}/WHEEL": tag, f"{info}/RECORD": b""}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {**members, **files}.items():
            archive.writestr(name, content)
    return buffer.getvalue()


class PackageIndex:
    """Serves /simple/tiny-target/ and the wheel, with byte ranges.

    Attributes:
        wheel: The bytes served.
        cuts: How many bytes the next transfers send before the connection drops, in turn.
        refuse: An HTTP status that the wheel's address answers, where not None.
        served: (first byte, bytes sent) of each transfer of the wheel so far.
    """

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.cuts: list[int] = []
        self.refuse: int | None = None
        self.served: list[tuple[int, int]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"

    def __enter__(self) -> PackageIndex:
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(index) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith(".whl"):
                    index._send_wheel(self)
                elif self.path.endswith(".metadata"):
                    index._send(self, 200, METADATA)
                elif self.path == "/simple/tiny-target/":
                    index._send(self, 200, index._page(), kind="text/html")
                else:
                    index._send(self, 404, b"")

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _page(self) -> bytes:
        digest = hashlib.sha256(METADATA).hexdigest()
        # Both names of PEP 714: pip before 23.3 knows the older one alone.
        said = f'data-core-metadata="sha256={digest}" data-dist-info-metadata="sha256={digest}"'
        link = f'<a href="/files/{WHEEL}" {said}>{WHEEL}</a>'
        return f"<!DOCTYPE html><html><body>{link}</body></html>".encode()

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        *,
        kind: str = "application/octet-stream",
        length: int | None = None,
        content_range: str | None = None,
    ) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        if content_range is not None:
            request.send_header("Content-Range", content_range)
        request.end_headers()
        request.wfile.write(body)

    def _send_wheel(self, request: BaseHTTPRequestHandler) -> None:
        if self.refuse is not None:
            self._send(request, self.refuse, b"")
            return
        asked = request.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-") or 0)
        rest = self.wheel[start:]
        sent = rest[: self.cuts.pop(0)] if self.cuts else rest
        self.served.append((start, len(sent)))
        span = f"bytes {start}-{len(self.wheel) - 1}/{len(self.wheel)}" if asked else None
        status = 206 if asked else 200
        self._send(request, status, sent, length=len(rest), content_range=span)
        request.close_connection = True
