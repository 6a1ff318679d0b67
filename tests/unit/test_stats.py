# SPDX-License-Identifier: Apache-2.0
"""What a server's counters say, read over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_dflash.cli import main
from sglang_dflash.stats import Stats, read, table

METRICS = """# HELP sglang:dflash_steps_total DFLASH: steps.
sglang:dflash_steps_total{kind="draft"} 30.0
sglang:dflash_steps_total{kind="plain"} 10.0
sglang:dflash_steps_created{kind="draft"} 1.7e+09
sglang:dflash_request_steps_total{kind="draft"} 60.0
sglang:dflash_request_steps_total{kind="plain"} 40.0
sglang:dflash_verified_rows_total{kind="draft"} 160.0
sglang:dflash_verified_rows_total{kind="plain"} 40.0
sglang:dflash_committed_tokens_total{kind="draft"} 110.0
sglang:dflash_committed_tokens_total{kind="plain"} 40.0
sglang:dflash_predicted_tokens_total{kind="draft"} 120.0
sglang:dflash_predicted_tokens_total{kind="plain"} 40.0
sglang:dflash_judged_total{position="1"} 60.0
sglang:dflash_judged_total{position="2"} 20.0
sglang:dflash_accepted_total{position="1"} 45.0
sglang:dflash_accepted_total{position="2"} 5.0
sglang:dflash_chance_judged_total{bin="3"} 20.0
sglang:dflash_chances_total{bin="3"} 7.0
sglang:dflash_chance_accepted_total{bin="3"} 5.0
sglang:dflash_chance_judged_total{bin="7"} 60.0
sglang:dflash_chances_total{bin="7"} 42.0
sglang:dflash_chance_accepted_total{bin="7"} 45.0
"""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server of one page."""
    page = getattr(request, "param", METRICS).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_figures_since_the_start(url: str) -> None:
    stats = Stats.between(read(url))
    assert stats.steps == 40
    assert stats.drafted == 0.75
    assert (stats.rows, stats.tokens, stats.predicted) == (2.0, 1.5, 1.6)
    assert stats.acceptance == [0.75, 0.25]
    assert stats.curve == [(0.35, 0.25, 20), (0.7, 0.75, 60)]
    assert stats.calibration_error == pytest.approx((0.1 * 20 + 0.05 * 60) / 80)
    assert "with the draft 75%" in table(stats)


def test_the_figures_between_two_readings(url: str) -> None:
    before = read(url)
    now = dict(before)
    now["steps", "plain"] += 5
    now["request_steps", "plain"] += 10
    now["verified_rows", "plain"] += 10
    now["committed_tokens", "plain"] += 10
    stats = Stats.between(now, before)
    assert (stats.steps, stats.drafted, stats.rows, stats.tokens) == (5, 0, 1, 1)
    assert stats.curve == []


@pytest.mark.parametrize("url", ["sglang:num_running_reqs 1.0\n"], indirect=True)
def test_a_server_without_the_counters_is_told(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", url]) == 1
    assert "SGLANG_DFLASH_BUDGET=fixed" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "http://127.0.0.1:1"]) == 1
    assert "--enable-metrics" in capsys.readouterr().err
