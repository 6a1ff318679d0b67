# SPDX-License-Identifier: Apache-2.0
"""Run folders, reports and comparisons, over points that a real sweep recorded."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.config import DatasetSpec, Published, PublishedRow, Recipe
from bench.errors import BenchError
from bench.folder import RunFolder, StoredRun
from bench.plan import Point
from bench.records import PointRecord
from bench.report import write_report
from bench.summary import spread
from bench.tables import as_markdown, published_tables, result_tables, settings_line

MakeRun = Callable[..., RunFolder]
PICTURES = ("throughput", "speedup", "tau", "positions", "widths", "ttft", "tpot")
DATASETS = {"datasets": {"gsm8k": {"sha256": "1"}}}
AGAIN = {"started": "later", "git": {}, "versions": {}, "machine": {}, "weights": {}, **DATASETS}


class Page(HTMLParser):
    """Collects what a browser would fetch, and which elements are there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset", "action") and value:
                self.fetched.append(value)


def slower(factor: float) -> Callable[[PointRecord], PointRecord]:
    """Return a change that stretches the speculative engine's times."""

    def change(record: PointRecord) -> PointRecord:
        if record.point.engine == "plain":
            return record
        stretched = tuple(
            dataclasses.replace(
                request, start_s=request.start_s * factor, ttft_s=request.ttft_s * factor,
                e2e_s=request.e2e_s * factor, chunk_s=tuple(t * factor for t in request.chunk_s),
            )
            for request in record.requests
        )  # fmt: skip
        return dataclasses.replace(record, requests=stretched)

    return change


def with_more(recipe: Recipe) -> Recipe:
    """Return the recipe with a second kind of prompt."""
    return dataclasses.replace(recipe, datasets=(*recipe.datasets, DatasetSpec("more")))


def as_more(record: PointRecord) -> PointRecord:
    """Return the point as one of the second kind."""
    return dataclasses.replace(record, point=record.point._replace(dataset="more"))


def test_a_stored_point_is_read_back(recorded_points: list[PointRecord]) -> None:
    for record in recorded_points:
        assert PointRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_the_folder_holds_what_the_issue_names(make_run: MakeRun) -> None:
    folder = make_run("run").path
    write_report([folder], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"git", "versions", "machine", "commands", "recipe", "datasets"} <= set(manifest)
    lines = [json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()]
    assert len(lines) == 8 * 4
    assert {(line["engine"], line["index"]) for line in lines} == {
        (engine, index) for engine in ("plain", "dflash") for index in range(4)
    }
    summary = json.loads((folder / "summary.json").read_text())
    for point in summary["points"]:
        assert {"engine", "dataset", "concurrency"} <= set(point)
        for name in ("output_tokens_per_s", "speedup"):
            assert {"mean", "low", "high", "min", "max", "cv"} <= set(point[name])
    assert summary["points"][1]["acceptance_length"]["mean"] > 2
    assert summary["points"][1]["mean_verify_width"]["mean"] == 8
    for name in PICTURES:
        assert (folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_whole_and_fetches_nothing(make_run: MakeRun) -> None:
    folder = make_run("run").path
    write_report([folder], folder)
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == len(PICTURES)
    assert "table" in page.tags
    assert not {"script", "img", "iframe", "object"} & set(page.tags)
    assert not [link for link in page.fetched if not link.startswith(("#", "data:"))]
    assert not re.search(r"@import|url\((?!#)", text)
    assert "&lt;the same&gt;" in text  # a command line is text, not markup
    assert len(text) < 5_000_000


def test_the_same_points_give_the_same_files(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("run").path
    names = ("summary.md", "report.html", "plots/speedup.png")
    write_report([folder], folder)
    before = {name: (folder / name).read_bytes() for name in names}
    for part in ("points", "logs", "plots"):  # a stored run may lack them
        (folder / part).rename(tmp_path / part)
    assert main(["report", str(folder)]) == 0
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_a_table_shows_its_numbers(make_run: MakeRun) -> None:
    folder = make_run("run").path
    text = (write_report([folder], folder) / "summary.md").read_text()
    row, latencies = [line for line in text.splitlines() if line.startswith("| 1 | dflash |")]
    assert "| 1.35 (1.33-1.37) |" in row
    assert "| 2.47 | 8.0 | 7/8 | 0/8 |" in row
    cells = latencies.split(" | ")
    assert [cell.count(" / ") for cell in cells[2:]] == [2, 2, 1, 1]


def test_the_speed_ups_of_all_kinds_stand_first(make_run: MakeRun) -> None:
    run = StoredRun(make_run("run").path)
    titles = [table.title for table in result_tables([run])]
    assert len(titles) == 2, "one kind of prompt needs no mean"
    again = []
    for point in run.points:
        values = [4 * value for value in point["speedup"]["values"]]
        whole_run = spread([value / 2 for value in values])
        again.append({**point, "dataset": "more", "speedup": spread(values),
                      "whole_run_speedup": whole_run})  # fmt: skip
    run.points += again
    run.recipe = with_more(run.recipe)
    table, whole_run = result_tables([run])[:2]
    assert table.header == whole_run.header == ("load", "dflash")
    assert whole_run.title == f"Speed-up of the whole run{table.title.removeprefix('Speed-up')}"
    (ratios,) = [
        point["speedup"]["values"]
        for point in run.points[: -len(again)]
        if point["engine"] == "dflash" and point["concurrency"] == 1
    ]
    low, high = 2 * min(ratios), 2 * max(ratios)  # sqrt(r * 4 r)
    assert table.rows[0] == ("1", f"{(low + high) / 2:.2f} ({low:.2f}-{high:.2f})")
    assert float(whole_run.rows[0][1].split()[0]) == pytest.approx((low + high) / 2**1.5, rel=0.01)


def test_a_mean_over_the_kinds_pairs_equal_repeats(
    recorded_recipe: Recipe, recorded_points: list[PointRecord], tmp_path: Path
) -> None:
    """The first repeat of one kind has failed: that of the other has no partner."""

    def overall(name: str, lost: Callable[[Point], bool]) -> tuple[list[StoredRun], list[str]]:
        folder = RunFolder.create(tmp_path / name, with_more(recorded_recipe), AGAIN)
        more = [slower(1 + 0.5 * r.point.repeat)(as_more(r)) for r in recorded_points]
        for record in [*recorded_points, *more]:
            if record.point.engine == "plain" or not lost(record.point):
                folder.write_point(record)
        folder.write_data()
        run = StoredRun(folder.path)
        return [run], [row[1] for row in result_tables([run])[0].rows]

    (whole,), cells = overall("whole", lambda point: False)
    first, second = (
        point["speedup"]["values"]
        for point in whole.points
        if point["engine"] == "dflash" and point["concurrency"] == 1
    )
    assert "-" not in cells
    paired = (first[1] * second[1]) ** 0.5
    _, cells = overall("failed", lambda p: (p.dataset, p.repeat) == ("gsm8k", 0))
    assert cells[0] == f"{paired:.2f} ({paired:.2f}-{paired:.2f})"
    _, cells = overall("crossed", lambda p: p.repeat == (p.dataset == "more"))
    assert set(cells) == {"-"}
    _, cells = overall("one kind", lambda p: p.dataset == "more" and p.level.concurrency == 1)
    assert cells[0] == "-" != cells[1]


def test_an_older_summary_without_a_repeat_gives_no_mean(make_run: MakeRun) -> None:
    """It does not say which repeat is missing."""
    run = StoredRun(make_run("run").path)
    run.recipe = with_more(run.recipe)
    run.points += [{**point, "dataset": "more"} for point in json.loads(json.dumps(run.points))]
    for point in run.points:
        del point["speedup"]["repeats"], point["whole_run_speedup"]
    assert "of the whole run" not in result_tables([run])[1].title
    assert [row[1] for row in result_tables([run])[0].rows].count("-") == 0
    run.points[1]["speedup"]["values"].pop()
    assert [row[1] for row in result_tables([run])[0].rows].count("-") == 1


def test_a_report_says_what_was_asked(make_run: MakeRun) -> None:
    folder = make_run("run").path
    text = (write_report([folder], folder) / "summary.md").read_text()
    assert "16 tokens an answer; greedy; requests for each under way: 4 at 1, 2 at 2;" in text
    assert "2 repeats, interleaved\n" in text  # and no cache that was not emptied


def test_requests_are_counted_where_prompts_run_out(make_run: MakeRun) -> None:
    """The recipe wants three for each under way; there were four prompts."""
    run = StoredRun(make_run("run").path)
    load = dataclasses.replace(run.recipe.load, prompts_per_slot=3)
    run.recipe = dataclasses.replace(run.recipe, load=load)
    assert "requests for each under way: 4 at 1, 2 at 2;" in settings_line(run)


def test_several_runs_stand_side_by_side(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run("first").path, make_run("second", slower(1.5)).path
    assert main(["report", str(first), str(second)]) == 2  # whose folder would it be?
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "both")]) == 0
    text = (tmp_path / "both/summary.md").read_text()
    assert "| dflash (first) |" in text
    assert "| dflash (second) |" in text
    assert not (first / "report.html").exists()


def test_published_numbers_stand_beside(make_run: MakeRun, recorded_recipe: Recipe) -> None:
    run = StoredRun(make_run("run").path)
    row = PublishedRow("dflash", "gsm8k", 6.54, {1: 500.0, 8: 900.0}, {1: 5.1})
    run.recipe = dataclasses.replace(recorded_recipe, published=(Published("a paper", (row,)),))
    (table,) = published_tables(run)
    assert "a paper" in as_markdown(table)
    assert table.rows[0] == ("gsm8k", "dflash", "1", "500", "31", "5.1", "1.35", "6.54", "2.47")
    assert table.rows[1] == ("gsm8k", "dflash", "8", "900", "-", "-", "-", "6.54", "-")


def test_failures_are_shown_and_go_when_the_point_succeeds(
    make_run: MakeRun, recorded_points: list[PointRecord]
) -> None:
    lost = recorded_points[0]
    folder = make_run("run", lambda record: None if record == lost else record)
    folder.write_failure(lost.point, "the server ended\n  | out of memory")
    folder.write_data()
    text = (write_report([folder.path], folder.path) / "summary.md").read_text()
    assert f"{lost.point.key}: the server ended" in text
    folder.write_point(lost)
    folder.write_data()
    assert StoredRun(folder.path).summary["failures"] == {}
    assert StoredRun(folder.path).summary["measurements"] == {"planned": 8, "finished": 8}


def test_an_interrupted_and_resumed_run_has_the_same_summary(
    make_run: MakeRun, recorded_recipe: Recipe, recorded_points: list[PointRecord]
) -> None:
    whole = make_run("whole").path
    done = {record.point.key for record in recorded_points[3:]}
    half = make_run("half", lambda record: record if record.point.key in done else None)
    assert json.loads((half.path / "summary.json").read_text())["measurements"]["finished"] == 5
    resumed = RunFolder.resume(half.path, recorded_recipe, AGAIN)
    for record in reversed(recorded_points[:3]):
        assert not resumed.is_finished(record.point)
        resumed.write_point(record)
    resumed.write_data()
    for name in ("summary.json", "raw.jsonl"):
        assert (half.path / name).read_bytes() == (whole / name).read_bytes()
    assert len(json.loads((half.path / "manifest.json").read_text())["resumed"]) == 1


def test_resuming_with_another_recipe_or_prompts_is_refused(
    make_run: MakeRun, recorded_recipe: Recipe
) -> None:
    path = make_run("run").path
    load = dataclasses.replace(recorded_recipe.load, max_new_tokens=17)
    with pytest.raises(BenchError, match=r"different: load.max_new_tokens\."):
        RunFolder.resume(path, dataclasses.replace(recorded_recipe, load=load), AGAIN)
    other = {**AGAIN, "datasets": {"gsm8k": {"sha256": "2"}}}
    with pytest.raises(BenchError, match=r"different: datasets.gsm8k.sha256"):
        RunFolder.resume(path, recorded_recipe, other)


def test_a_new_run_never_writes_into_an_old_one(make_run: MakeRun, recorded_recipe: Recipe) -> None:
    path = make_run("run").path
    with pytest.raises(BenchError, match="exists: go on with it by --resume"):
        RunFolder.create(path, recorded_recipe, AGAIN)


@pytest.mark.parametrize(
    ("factor", "limit", "code"),
    [(1.0, "0.97", 0), (1.02, "0.97", 0), (1.1, "0.97", 1), (1.1, "0.9", 0), (0.5, "0.97", 0)],
)
def test_compare_exits_by_the_ratio(
    make_run: MakeRun, factor: float, limit: str, code: int
) -> None:
    old, new = make_run("old").path, make_run("new", slower(factor)).path
    for metric in ("speedup", "output_tokens_per_s"):
        arguments = ["compare", str(old), str(new), "--fail-below", limit, "--metric", metric]
        assert main(arguments) == code


def test_a_point_that_is_gone_is_a_regression(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep(record: PointRecord) -> PointRecord | None:
        gone = record.point.engine == "dflash" and record.point.level.concurrency == 2
        return None if gone else record

    old, new = make_run("old").path, make_run("new", keep).path
    assert main(["compare", str(old), str(new)]) == 1
    assert "MISSING" in capsys.readouterr().out
    assert main(["compare", str(new), str(old)]) == 0  # a new point is no loss


def test_comparing_what_is_no_run_is_a_mistake(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("run").path
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(run), str(tmp_path / "empty")]) == 2
    assert "is not a run folder" in capsys.readouterr().err

    def only_plain(record: PointRecord) -> PointRecord | None:
        return record if record.point.engine == "plain" else None

    assert main(["compare", str(run), str(make_run("plain", only_plain).path)]) == 2
    assert "no point with a speedup in common" in capsys.readouterr().err


def test_open_loop_points_are_in_the_table(
    make_run: MakeRun, recorded_points: list[PointRecord]
) -> None:
    """They have no place on an axis of concurrency, and must not break the plots."""

    def open_loop(record: PointRecord) -> PointRecord:
        level = record.point.level._replace(concurrency=None, request_rate=0.5)
        return dataclasses.replace(record, point=record.point._replace(level=level))

    folder = make_run("run")
    point: dict[str, Any] = folder.recipe.load.__dict__ | {
        "concurrency": (), "request_rates": (0.5,)
    }  # fmt: skip
    recipe = dataclasses.replace(folder.recipe, load=type(folder.recipe.load)(**point))
    again = RunFolder.create(folder.path.with_name("open"), recipe, AGAIN | {
        "commands": {}, "machine": {"cpu": "a CPU", "cores": 2, "memory_gb": 24, "gpus": []},
        "git": {"commit": None, "dirty": False},
    })  # fmt: skip
    for record in recorded_points:
        if record.point.level.concurrency == 1:
            again.write_point(open_loop(record))
    again.write_data()
    text = (write_report([again.path], again.path) / "summary.md").read_text()
    assert "| 0.5/s | dflash |" in text
    assert Point("a", "b", open_loop(recorded_points[0]).point.level, 1).key == "a.b.rate0.5.r1"
