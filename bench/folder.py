# SPDX-License-Identifier: Apache-2.0
"""A run folder: one file per finished point, and views that are made of those files alone.

    manifest.json   what was run, where, with what
    points/         one JSON per finished point, with every chunk's time: the source of the rest
    failures/       one text per point that failed; gone when it succeeds later
    logs/           what the servers printed
    raw.jsonl       one line per request
    summary.json, summary.md, report.html, plots/

`points/` and `logs/` may be left out of a stored run: reports are drawn from summary.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from bench.config import Recipe
from bench.errors import BenchError
from bench.plan import Point, make_plan
from bench.records import PointRecord
from bench.strict import build
from bench.summary import summarise
from sglang_dflash.strict import plain

__all__ = ["SCHEMA", "RunFolder", "StoredRun", "write_atomically"]

SCHEMA = 1
NOT_IN_RAW = ("chunk_s", "chunk_tokens")


class RunFolder:
    """A sweep's own folder, while it is measured."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path, self.recipe = path, recipe
        self.logs = path / "logs"
        self._made = [place for place in (path, *path.parents) if not place.exists()]

    @classmethod
    def create(cls, path: Path, recipe: Recipe, manifest: dict[str, Any]) -> RunFolder:
        """Make a new folder.

        Raises:
            BenchError: it exists, or cannot be made.
        """
        folder = cls(path, recipe)
        try:
            path.mkdir(parents=True)
            for part in ("points", "failures", "logs"):
                (path / part).mkdir()
            full = {"schema": SCHEMA, **manifest, "recipe": plain(recipe)}
            write_atomically(path / "manifest.json", _pretty(full))
        except FileExistsError as error:
            raise BenchError(
                f"{path} exists: go on with it by --resume {path}, or name another by --out"
            ) from error
        except OSError as error:
            raise BenchError(f"cannot make the run folder {path}: {error}") from error
        return folder

    @classmethod
    def resume(cls, path: Path, recipe: Recipe, manifest: dict[str, Any]) -> RunFolder:
        """Open the folder of a run that was interrupted, and note that it goes on.

        Raises:
            BenchError: no run folder, or one of another recipe, prompts or schema.
        """
        old = _read_json(path / "manifest.json", "is not a run folder")
        if old.get("schema") != SCHEMA:
            raise BenchError(f"{path}: its schema is {old.get('schema')}, this is {SCHEMA}")
        changed = _differences(old["recipe"], json.loads(json.dumps(plain(recipe))))
        changed += _differences(old["datasets"], manifest["datasets"], "datasets.")
        if changed:
            raise BenchError(
                f"{path} was measured with another recipe; different: {', '.join(changed)}. "
                "Give the recipe it was started with (and --quick as then)"
            )
        parts = ("started", "git", "versions", "machine", "weights")
        again = {name: manifest[name] for name in parts}
        write_atomically(
            path / "manifest.json", _pretty({**old, "resumed": [*old.get("resumed", []), again]})
        )
        return cls(path, recipe)

    def is_finished(self, point: Point) -> bool:
        """Whether `point` has been measured."""
        return (self.path / "points" / f"{point.key}.json").is_file()

    def write_point(self, record: PointRecord) -> None:
        """Store a finished point: whole or not at all."""
        key = record.point.key
        write_atomically(self.path / "points" / f"{key}.json", json.dumps(record.to_json()))
        (self.path / "failures" / f"{key}.txt").unlink(missing_ok=True)

    def write_failure(self, point: Point, text: str) -> None:
        """Store why a point could not be measured."""
        write_atomically(self.path / "failures" / f"{point.key}.txt", text + "\n")

    def records(self) -> list[PointRecord]:
        """Return all finished points, in the plan's order."""
        planned = [point for stage in make_plan(self.recipe) for point in stage.points]
        files = [self.path / "points" / f"{point.key}.json" for point in planned]
        return [
            PointRecord.from_json(json.loads(file.read_text(encoding="utf-8")))
            for file in files
            if file.is_file()
        ]

    def failures(self) -> dict[str, str]:
        """Return the reason by point key."""
        files = sorted((self.path / "failures").glob("*.txt"))
        return {file.stem: file.read_text(encoding="utf-8").strip() for file in files}

    def write_data(self) -> None:
        """Derive raw.jsonl and summary.json from the points."""
        records = self.records()
        lines = [json.dumps(line) for record in records for line in _raw_lines(record)]
        write_atomically(self.path / "raw.jsonl", "".join(line + "\n" for line in lines))
        planned = sum(len(stage.points) for stage in make_plan(self.recipe))
        summary = {
            "schema": SCHEMA,
            "baseline": self.recipe.baseline,
            "measurements": {"planned": planned, "finished": len(records)},
            "failures": {key: text.splitlines()[0] for key, text in self.failures().items()},
            "points": _rounded(summarise(self.recipe, records)),
        }
        write_atomically(self.path / "summary.json", _pretty(summary))

    def remove_if_empty(self) -> None:
        """Remove a new folder where no point was finished: nothing half-written stays."""
        if not any((self.path / "points").iterdir()):
            shutil.rmtree(self.path)
            for parent in self._made[1:]:
                with contextlib.suppress(OSError):  # another has put something there
                    parent.rmdir()


class StoredRun:
    """A run as reports and comparisons read it."""

    def __init__(self, path: Path) -> None:
        """Read `path`.

        Raises:
            BenchError: no run folder, or one of another schema.
        """
        self.path, self.name = path, path.resolve().name
        self.manifest = _read_json(path / "manifest.json", "is not a run folder")
        self.summary = _read_json(path / "summary.json", "has no summary yet")
        if self.summary.get("schema") != SCHEMA:
            raise BenchError(f"{path}: its schema is {self.summary.get('schema')}, not {SCHEMA}")
        self.points: list[dict[str, Any]] = self.summary["points"]
        self.recipe = build(Recipe, self.manifest["recipe"], f"{path}/manifest.json")


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole or absent, also after a power cut."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(path)


def _raw_lines(record: PointRecord) -> list[dict[str, Any]]:
    data = record.to_json()
    return [
        {**data["point"], **{k: v for k, v in request.items() if k not in NOT_IN_RAW}}
        for request in data["requests"]
    ]


def _read_json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BenchError(f"{path.parent} {otherwise}: {path.name}: {error}") from error


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of values that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys([*old, *new])
        found = [_differences(old.get(n), new.get(n), f"{prefix}{n}.") for n in names]
        return [name for part in found for name in part]
    return [] if old == new else [prefix.rstrip(".")]


def _rounded(data: Any) -> Any:
    """Return the data with six significant digits: more is noise."""
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return float(f"{data:.6g}") if isinstance(data, float) else data


def _pretty(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"
