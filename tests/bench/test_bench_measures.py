# SPDX-License-Identifier: Apache-2.0
"""Numbers from requests whose right values are worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import pytest

from bench.config import Recipe
from bench.measures import acceptance, measure, percentiles, steady_window, tokens_in
from bench.plan import Level, Point
from bench.records import PointRecord, RequestRecord
from bench.summary import spread, summarise


def request(start_s: float = 0.0, e2e_s: float = 1.0, **fields: Any) -> RequestRecord:
    """Return a request whose 10 tokens come in five chunks of two, evenly until its end."""
    values = {
        "index": 0, "ttft_s": e2e_s / 5, "prompt_tokens": 3, "output_tokens": 10,
        "chunk_s": tuple(e2e_s * k / 5 for k in range(1, 6)), "chunk_tokens": (2, 4, 6, 8, 10),
        "text_sha256": "x", "steps": 0, "accepted": 0, "histogram": (), "verified_rows": None,
        "error": None,
    }  # fmt: skip
    return RequestRecord(start_s=start_s, e2e_s=e2e_s, **{**values, **fields})


def point_of(
    *requests: RequestRecord, engine: str = "plain", repeat: int = 0, concurrency: int = 1,
    has_text: bool = True,
) -> PointRecord:  # fmt: skip
    return PointRecord(
        Point(engine, "gsm8k", Level(concurrency), repeat), 2**30, "rss", has_text,
        "2026-01-01T00:00:00+00:00",
        tuple(dataclasses.replace(r, index=i) for i, r in enumerate(requests)),
    )  # fmt: skip


def test_one_slot_is_steady_from_the_first_request_to_the_last_answer() -> None:
    assert steady_window([request(0), request(1.1), request(2.2)], 1) == (0, 3.2)


def test_the_window_ends_with_the_first_slot_that_stays_empty() -> None:
    """Two slots; the third request takes over at 1.0, so the load falls to one at 2.0."""
    requests = [request(0, 1.0), request(0.1, 1.9), request(1.0, 4.0)]
    assert steady_window(requests, 2) == (0.1, 2.0)


def test_a_window_has_a_prefill_to_each_answer_at_one_slot() -> None:
    """Were the first left out, what makes decoding faster would seem to gain more than it does."""
    requests = [request(0, 1.0), request(1.0, 1.0)]
    window = steady_window(requests, 1)
    assert window.start_s < requests[0].ttft_s
    assert sum(tokens_in(r, window) for r in requests) / (window.end_s - window.start_s) == 10


def test_an_open_loop_or_empty_slots_give_the_whole_run() -> None:
    requests = [request(0), request(5)]
    assert steady_window(requests, None) == (0, 6)
    assert steady_window(requests, 3) == (0, 6)
    assert steady_window(requests, 2) == (0, 6)  # never two at a time


def test_tokens_are_counted_by_the_time_of_their_chunk() -> None:
    one = request(10, 5)  # chunks at 11, 12, ... 15
    assert tokens_in(one, steady_window([one], None)) == 10
    assert tokens_in(one, type(steady_window([one], None))(11.5, 14.0)) == 6
    silent = dataclasses.replace(one, chunk_tokens=(0,) * 5)
    assert tokens_in(silent, type(steady_window([one], None))(11.5, 14.0)) == 6


def test_measures_of_a_point() -> None:
    failed = request(0, error="refused", output_tokens=0, chunk_s=(), chunk_tokens=())
    found = measure(point_of(request(0, 2.0), request(2.0, 2.0), failed))
    assert found["errors"] == 1
    assert found["requests"] == 3
    assert found["output_tokens_per_s"] == pytest.approx(20 / 4)
    assert found["ttft_ms"]["p50"] == pytest.approx(400)
    assert found["tpot_ms"]["mean"] == pytest.approx(1600 / 9)
    assert found["tokens_per_s_per_user"] == pytest.approx(9 / 1.6)
    assert found["chunk_gap_ms"]["p99"] == pytest.approx(400)
    assert found["e2e_ms"]["p90"] == pytest.approx(2000)


def test_a_point_whose_requests_all_failed_has_errors_only() -> None:
    found = measure(point_of(request(error="refused")))
    assert found["errors"] == 1
    assert "output_tokens_per_s" not in found


def test_acceptance_is_summed_over_requests() -> None:
    """Three steps accepted 0, 2, 2 and one accepted 1: of 4 steps, 3 took the first proposal."""
    found = acceptance([
        request(steps=3, accepted=4, histogram=(1, 0, 2), verified_rows=12),
        request(steps=1, accepted=1, histogram=(0, 1)),
        request(steps=9, accepted=9, histogram=(0, 9), error="refused"),
    ])  # fmt: skip
    assert found == {"steps": 4, "accepted": 5, "survival": [3, 2], "verified_rows": 12,
                     "steps_with_width": 3}  # fmt: skip


def test_percentiles_and_spread() -> None:
    found = percentiles(list(range(1, 102)))
    assert found == {"mean": 51, "p50": 51, "p90": 91, "p99": 100}
    assert percentiles([]) is None
    values = [1.0, 2.0, 4.0]
    whole = spread(values)
    assert whole is not None
    # Student's t for two degrees of freedom has a closed form: t = a * sqrt(2 / (1 - a^2))
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) * statistics.stdev(values) / math.sqrt(3)
    assert whole["high"] - whole["mean"] == pytest.approx(half)
    assert whole["cv"] == pytest.approx(statistics.stdev(values) / statistics.fmean(values))
    assert spread([3.0]) == {"mean": 3, "low": None, "high": None, "min": 3, "max": 3, "cv": None,
                             "values": [3.0]}  # fmt: skip


def by_engine(points: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {point["engine"]: point for point in points}


def test_speed_ups_are_taken_within_a_repeat(recorded_recipe: Recipe) -> None:
    """The machine is half as fast in the second repeat: the ratio does not see it."""
    records = [
        point_of(request(e2e_s=seconds), engine=engine, repeat=repeat)
        for engine, repeat, seconds in (("plain", 0, 1), ("dflash", 0, 0.5), ("plain", 1, 2),
                                        ("dflash", 1, 1), ("dflash", 2, 1))
    ]  # fmt: skip
    point = by_engine(summarise(recorded_recipe, records))["dflash"]
    assert point["speedup"]["values"] == pytest.approx([2.0, 2.0])
    assert point["output_tokens_per_s"]["values"] == pytest.approx([20, 10, 10])
    assert point["repeats"] == 3


def test_the_whole_run_has_a_speed_up_of_its_own(recorded_recipe: Recipe) -> None:
    """Two slots; the fast engine's second one idles for the last half of its run."""
    plain = point_of(request(0, 2.0), request(0, 2.0), concurrency=2)
    fast = point_of(request(0, 0.5), request(0, 1.0), engine="dflash", concurrency=2)
    point = by_engine(summarise(recorded_recipe, [plain, fast]))["dflash"]
    assert point["speedup"]["values"] == pytest.approx([(14 / 0.5) / (20 / 2)])
    assert point["whole_run_speedup"]["values"] == pytest.approx([(20 / 1) / (20 / 2)])
    assert point["whole_run_speedup"]["repeats"] == [0]


def test_tau_and_width_are_sums_over_sums(recorded_recipe: Recipe) -> None:
    whole = request(steps=1, accepted=7, histogram=(0,) * 7 + (1,), verified_rows=8)
    narrow = request(steps=3, accepted=0, histogram=(3,), verified_rows=4)
    (point,) = summarise(recorded_recipe, [point_of(whole), point_of(narrow, repeat=1)])
    assert point["acceptance_length"]["mean"] == pytest.approx((7 + 4) / 4)  # not (8 + 1) / 2
    assert point["acceptance_by_position"] == [0.25] * 7
    assert 1 + sum(point["acceptance_by_position"]) == point["acceptance_length"]["mean"]
    assert point["mean_verify_width"]["mean"] == (8 + 4) / 4
    assert point["mean_verify_width"]["values"] == [8, pytest.approx(4 / 3)]


def test_random_tokens_and_plain_decoding_have_no_tau(recorded_recipe: Recipe) -> None:
    one = request(steps=4, accepted=2, histogram=(2, 2))
    (noise,) = summarise(recorded_recipe, [point_of(one, has_text=False)])
    (plain,) = summarise(recorded_recipe, [point_of(request())])
    for point in (noise, plain):
        assert point["acceptance_length"] is None
        assert point["acceptance_by_position"] is None
        assert point["mean_verify_width"] is None


def test_texts_are_compared_with_the_baseline_s(recorded_recipe: Recipe) -> None:
    plain = point_of(request(text_sha256="a"), request(text_sha256="b"), request(error="lost"))
    other = point_of(
        request(text_sha256="a"), request(text_sha256="c"), request(text_sha256="d"),
        engine="dflash",
    )  # fmt: skip
    points = by_engine(summarise(recorded_recipe, [plain, other]))
    assert points["dflash"]["identical"] == {"same": 1, "of": 2}
    assert points["plain"]["identical"] is None
    load = dataclasses.replace(recorded_recipe.load, temperature=0.7)
    sampled = dataclasses.replace(recorded_recipe, load=load)
    assert by_engine(summarise(sampled, [plain, other]))["dflash"]["identical"] is None


def test_recorded_points_give_what_was_seen(
    recorded_recipe: Recipe, recorded_points: list[PointRecord]
) -> None:
    """Two engines, four requests a point, 16 tokens each; counted from the file by hand."""
    points = summarise(recorded_recipe, recorded_points)
    assert [(p["engine"], p["concurrency"]) for p in points] == [
        ("plain", 1), ("dflash", 1), ("plain", 2), ("dflash", 2),
    ]  # fmt: skip
    for point in points:
        rate = point["output_tokens_per_s"]["mean"]
        assert rate == pytest.approx(point["whole_run_tokens_per_s"]["mean"], rel=0.25)
        assert point["errors"] == 0
        assert point["requests"] == 8
    one = points[1]
    steps = sum(r.steps for p in recorded_points for r in p.requests if p.point[0] == "dflash"
                and p.point.level.concurrency == 1)  # fmt: skip
    assert one["acceptance_length"]["mean"] == pytest.approx(2.47, abs=0.01)
    assert steps == 49
    assert one["acceptance_by_position"] == sorted(one["acceptance_by_position"], reverse=True)
