# SPDX-License-Identifier: Apache-2.0
"""The real server on the real pair, driven by the real OpenAI client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pairs import Pair

from sglang_dflash.acceptance import by_position
from sglang_dflash.cli import main

pytestmark = pytest.mark.slow

QUESTION = "Name three colours of the rainbow."


# The schemas alone bound the length, not how much white space a small model likes.
JSON_FLAGS = ["--constrained-json-disable-any-whitespace"]
SUBJECTS = ["a river", "an old car", "a violin", "bread", "the moon"]
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "size": {"enum": ["small", "middling", "large"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "size", "count"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "known": {"type": "boolean"},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["known", "place"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
    {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 100, "maximum": 200}]},
]


class Server:
    """A server process: where it listens and how to speak to it."""

    def __init__(self, port: int, process: subprocess.Popen, log: Path) -> None:
        self.url, self.process, self.log = f"http://127.0.0.1:{port}", process, log
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")

    def chat(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """Return a greedy completion of at most 48 tokens."""
        return self.client.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=48, **options
        )


def launch(pair: Pair, log: Path, *flags: str) -> Server:
    """Start a server and wait until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(pair.target),
        "--dtype", "float32", "--port", str(port), "--context-length", "1024",
        "--max-total-tokens", "8192", *flags,
    ]  # fmt: skip
    # At least one proposal is always verified, so that acceptance can be looked at.
    environment = {**os.environ, "SGLANG_DFLASH_MIN_WIDTH": "2"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    server = Server(port, process, log)
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            if httpx.get(f"{server.url}/health_generate", timeout=60).status_code == 200:
                return server
        except httpx.TransportError:
            time.sleep(0.5)


def stop(server: Server) -> None:
    """End the server as a user's Ctrl-C would."""
    server.process.terminate()
    server.process.wait(timeout=60)


def conversation(server: Server) -> list[str]:
    """Return the answers of two chat turns and of a raw completion."""
    messages = [{"role": "user", "content": QUESTION}]
    first = server.chat(messages).choices[0].message.content
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Which of them is the warmest?"},
    ]
    second = server.chat(messages).choices[0].message.content
    raw = server.client.completions.create(
        model="default", prompt="def fibonacci(n):\n", temperature=0, max_tokens=48
    )
    return [first, second, raw.choices[0].text]


def structured(server: Server, temperature: float) -> list[str]:
    """Return what the server writes about each subject in each schema, all asked for at once."""

    def ask(subject: str, schema: dict[str, Any]) -> str:
        reply = server.client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"Describe {subject} in JSON."}],
            temperature=temperature,
            max_tokens=64,
            response_format={
                "type": "json_schema", "json_schema": {"name": "it", "schema": schema}
            },
        )  # fmt: skip
        return reply.choices[0].message.content

    with ThreadPoolExecutor(max_workers=8) as pool:
        pairs = [(subject, schema) for schema in SCHEMAS for subject in SUBJECTS]
        return list(pool.map(ask, *zip(*pairs, strict=True)))


@pytest.fixture(scope="module")
def plain(
    smollm2_pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], list[str]]:
    """What the server says without speculation: freely, and in the schemas."""
    server = launch(smollm2_pair, tmp_path_factory.mktemp("plain") / "log", *JSON_FLAGS)
    answers = conversation(server), structured(server, temperature=0)
    stop(server)
    return answers


@pytest.fixture(scope="module")
def plain_answers(plain: tuple[list[str], list[str]]) -> list[str]:
    """What the server says without speculation, freely."""
    return plain[0]


@pytest.fixture(scope="module")
def server(
    smollm2_pair: Pair, plain_answers: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with DFLASH and metrics."""
    started = launch(
        smollm2_pair, tmp_path_factory.mktemp("dflash") / "log",
        "--speculative-algorithm", "DFLASH",
        "--speculative-draft-model-path", str(smollm2_pair.draft), "--enable-metrics",
        "--enable-return-hidden-states", *JSON_FLAGS,
    )  # fmt: skip
    yield started
    stop(started)


def test_one_log_line_says_who_serves(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "DFLASH is served by" in line]
    assert len(lines) == 1
    assert "sglang-dflash" in lines[0]
    assert "block size 8" in lines[0]
    assert "smollm2-135m-dflash-b8" in lines[0]


def test_two_turns_and_a_completion_equal_plain_decoding(
    server: Server, plain_answers: list[str]
) -> None:
    assert conversation(server) == plain_answers


def test_streaming_gives_the_same_text(server: Server, plain_answers: list[str]) -> None:
    chunks = list(server.chat([{"role": "user", "content": QUESTION}], stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(chunks) > 3
    assert text == plain_answers[0]


def test_meta_info_tells_acceptance(server: Server) -> None:
    reply = httpx.post(
        f"{server.url}/generate",
        json={
            "text": "Once upon a time",
            "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
        },
        timeout=120,
    ).json()
    meta = reply["meta_info"]
    assert meta["completion_tokens"] == 40
    assert meta["spec_accept_length"] == pytest.approx(40 / meta["spec_verify_ct"])
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"]
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    assert accepted == meta["spec_num_correct_drafts"] > 0
    widths = meta["spec_cap_lens_histogram"]
    assert sum(widths) == meta["spec_verify_ct"]
    assert widths[0] == 0  # the anchor is always verified
    assert len(widths) <= 9
    rows = sum(width * steps for width, steps in enumerate(widths))
    assert meta["spec_cap_length"] == pytest.approx(rows / meta["spec_verify_ct"])
    assert rows >= accepted + meta["spec_verify_ct"]


def test_meta_info_tells_acceptance_by_position(server: Server) -> None:
    """By position as by step: the lists add up to the request's own counts."""
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    texts = ["Once upon a time", "def fibonacci(n):\n"]
    for reply in httpx.post(
        f"{server.url}/generate", json={"text": texts, "sampling_params": params}, timeout=120
    ).json():
        meta = reply["meta_info"]
        verified = meta["spec_verified_per_position"]
        accepted = meta["spec_accepted_per_position"]
        assert verified[0] == meta["spec_verify_ct"]  # no width is below 2 here
        assert sum(verified) == round((meta["spec_cap_length"] - 1) * meta["spec_verify_ct"])
        assert sum(accepted) == meta["spec_num_correct_drafts"] > 0
        assert all(a <= v for a, v in zip(accepted, verified, strict=True))
        assert accepted == sorted(accepted, reverse=True)
        steps = meta["spec_cap_lens_histogram"]  # by width; position k is in widths above k
        assert verified == [sum(steps[k + 1 :]) for k in range(1, len(verified) + 1)]


def test_the_openai_api_tells_the_histograms_it_follows_from(server: Server) -> None:
    reply = server.chat(
        [{"role": "user", "content": QUESTION}], extra_body={"return_spec_tokens_details": True}
    ).model_dump()
    details = reply["sglext"]["spec_tokens_details"]
    found = by_position(
        details["spec_cap_lens_histogram"], details["spec_correct_drafts_histogram"]
    )
    assert found["spec_verified_per_position"][0] == details["spec_verify_ct"] > 0
    assert sum(found["spec_accepted_per_position"]) == details["spec_num_correct_drafts"]


def test_metrics_tell_acceptance(server: Server) -> None:
    for _ in range(4):  # the gauges are set once in 40 steps
        server.chat([{"role": "user", "content": QUESTION}], extra_body={"ignore_eos": True})
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    values = [
        float(line.split()[-1]) for line in lines if line.startswith("sglang:spec_accept_length{")
    ]
    assert values
    assert max(values) > 1


def test_stats_tell_what_the_budget_chose(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.chat([{"role": "user", "content": QUESTION}], extra_body={"ignore_eos": True})
    assert main(["stats", server.url, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["steps"] > 10
    assert stats["drafted"] == 1
    assert 2 <= stats["rows"] <= 8
    assert 1 < stats["tokens"] < stats["rows"]
    assert abs(stats["predicted"] - stats["tokens"]) < 0.5
    assert len(stats["acceptance"]) == 7
    assert 0 < stats["acceptance"][0] < 1
    assert sum(count for *_, count in stats["curve"]) > 10
    assert main(["stats", server.url]) == 0
    assert "accepted by position" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_answers_are_valid_and_those_of_plain_decoding(
    server: Server, plain: tuple[list[str], list[str]], temperature: float
) -> None:
    answers = structured(server, temperature)
    schemas = [schema for schema in SCHEMAS for _ in SUBJECTS]
    for answer, schema in zip(answers, schemas, strict=True):
        jsonschema.validate(json.loads(answer), schema)
    if temperature == 0:
        assert answers == plain[1]


@pytest.mark.parametrize(
    ("options", "name"), [({"extra_body": {"return_hidden_states": True}}, "return_hidden_states")]
)
def test_a_refused_request_is_told_why_and_the_server_goes_on(
    server: Server, plain_answers: list[str], options: dict[str, Any], name: str
) -> None:
    request = {"temperature": 0, "max_tokens": 8, **options}
    with pytest.raises(openai.BadRequestError, match=name):
        server.client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": QUESTION}], **request
        )
    again = server.chat([{"role": "user", "content": QUESTION}]).choices[0].message.content
    assert again == plain_answers[0]
