# SPDX-License-Identifier: Apache-2.0
"""What a server's counters say, read over HTTP."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_dflash.cli import main
from sglang_dflash.stats import Stats, has_restarted, read, table

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


class Server:
    """A server whose pages come in turn, the last one again and again; None hangs up half-way."""

    def __init__(self, *pages: str | None) -> None:
        left = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(200 if self.path == "/metrics" else 404)
                if page is None:
                    self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write((page or "sglang:dflash_steps").encode())

            def log_message(self, *_: object) -> None:
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        # Looked at often: the default makes each test wait for half a second at its end.
        serve = functools.partial(self._http.serve_forever, poll_interval=0.02)
        threading.Thread(target=serve, daemon=True).start()
        self.host = f"127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers, and take them down."""
    servers: list[Server] = []

    def start(*pages: str | None) -> Server:
        servers.append(Server(*pages))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def url(request: pytest.FixtureRequest, serve: Callable[..., Server]) -> str:
    """A server of one page."""
    return f"http://{serve(getattr(request, 'param', METRICS)).host}"


def watched(monkeypatch: pytest.MonkeyPatch, num_readings: int, *arguments: str) -> int:
    """Return the exit code of a watch that Ctrl-C ends after so many readings."""
    left = iter(range(num_readings - 1))

    def sleep(seconds: float) -> None:
        assert seconds == 2.5
        if next(left, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    return main(["stats", "--watch", "2.5", *arguments])


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


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "1e300", "soon"])
def test_an_impossible_interval_is_refused_by_the_option_s_name(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["stats", "http://127.0.0.1:1", f"--watch={value}"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"argument --watch: '{value}' is not a number of seconds above 0" in line


def test_a_url_needs_no_scheme(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", serve(METRICS).host]) == 0
    assert capsys.readouterr().out.startswith("since the server's start:\nsteps 40,")


@pytest.mark.parametrize("page", [None, 'sglang:dflash_steps_total{kind="draft"} 1e'])
def test_a_reply_that_is_cut_off_is_one_line(
    page: str | None, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    host = serve(page).host
    assert main(["stats", host]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"http://{host}/metrics: ")


def test_an_address_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "http://no such host"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_watch_says_from_when_its_figures_are(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    later = METRICS.replace('steps_total{kind="plain"} 10.0', 'steps_total{kind="plain"} 17.0')
    host = serve(METRICS, later).host
    assert watched(monkeypatch, 2, host) == 130
    out = capsys.readouterr().out
    assert "since the server's start:\nsteps 40," in out
    assert "since the last reading:\nsteps 7," in out


def test_a_failed_reading_does_not_end_a_watch(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    later = METRICS.replace('steps_total{kind="plain"} 10.0', 'steps_total{kind="plain"} 17.0')
    host = serve(METRICS, None, "nothing yet\n", later).host
    assert watched(monkeypatch, 4, host, "--json") == 130
    said = capsys.readouterr()
    told = [json.loads(line) for line in said.out.splitlines()]
    assert [(line["since"], line["steps"]) for line in told] == [
        ("the server's start", 40),
        ("the last reading", 7),
    ]
    cut_off, without, _ = said.err.splitlines()
    assert "IncompleteRead" in cut_off
    assert "has no sglang:dflash counters" in without


def test_a_watch_begins_anew_with_the_server(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    young = 'sglang:dflash_steps_total{kind="draft"} 3.0\n'
    assert watched(monkeypatch, 2, serve(METRICS, young).host, "--json") == 130
    said = capsys.readouterr()
    last = json.loads(said.out.splitlines()[-1])
    assert (last["since"], last["steps"]) == ("the server's start", 3)
    assert "the server was started anew" in said.err


def test_rounding_is_no_restart() -> None:
    before = {("chances", "3"): 0.1 + 0.2, ("steps", "draft"): 5.0}
    assert not has_restarted({("chances", "3"): 0.3, ("steps", "draft"): 5.0}, before)
    assert has_restarted({("chances", "3"): 0.3, ("steps", "draft"): 4.0}, before)
