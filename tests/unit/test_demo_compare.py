# SPDX-License-Identifier: Apache-2.0
"""The demo's figures, and the processes that hold its engines."""

from __future__ import annotations

import json
import os
import time

import pytest

from sglang_dflash.demo import DemoError, engine
from sglang_dflash.demo.compare import Divergence, PromptResult, result_table, summarise
from sglang_dflash.demo.engine import Answer, EngineProcess
from sglang_dflash.demo.run import _divergence


def answer(num_tokens: int, seconds: float, num_steps: int = 0, num_accepted: int = 0) -> Answer:
    return Answer("text", list(range(num_tokens)), seconds, num_steps, num_accepted)


def result(kind: str, plain: Answer, dflash: Answer, divergence=None) -> PromptResult:
    return PromptResult(kind, "a prompt", plain, dflash, divergence)


@pytest.fixture
def results() -> list[PromptResult]:
    return [
        result("code", answer(21, 2.0), answer(21, 1.0, num_steps=10, num_accepted=12)),
        result("chat", answer(11, 1.0), answer(11, 1.0, num_steps=10, num_accepted=0)),
    ]


def test_rates_are_sums_over_sums(results):
    figures = summarise(results)
    assert figures["autoregressive"]["tokens_per_s"] == pytest.approx(32 / 3)
    assert figures["dflash"]["tokens_per_s"] == pytest.approx(32 / 2)
    assert figures["speedup"] == pytest.approx(1.5)
    assert figures["identical"]


def test_acceptance_length_counts_steps_and_not_the_token_of_prefill(results):
    assert summarise(results[:1])["acceptance_length"] == pytest.approx(2.2)
    assert summarise(results)["acceptance_length"] == pytest.approx(1 + 12 / 20)


def test_an_answer_of_one_token_has_no_acceptance_length():
    one = [result("chat", answer(1, 0.1), answer(1, 0.1))]
    assert summarise(one)["acceptance_length"] is None
    assert " -  " in result_table(one)


def test_the_table_has_a_row_for_each_kind_and_for_all(results):
    lines = result_table(results).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["code", "chat", "all"]
    assert lines[-1].split()[1:] == ["2", "10.7", "16.0", "1.50x", "1.60", "2", "of", "2"]


def test_one_kind_needs_no_total(results):
    assert "all" not in result_table(results[:1])


def test_a_difference_is_in_the_record_and_the_totals(results):
    odd = result("chat", answer(3, 1.0), answer(4, 1.0), Divergence(3, "", " more", None))
    assert not summarise([*results, odd])["identical"]
    record = json.loads(json.dumps(odd.as_json()))
    assert record["divergence"]["index"] == 3
    assert record["answers"] == {"autoregressive": "text", "dflash": "text"}


class Scorer:
    """Stands in for the plain engine: fixed scores, ids as text."""

    def log_probs(self, prompt, prefix, token_ids):
        assert (prompt, prefix) == ("a prompt", [1, 2])
        return [-1.0, -1.25]

    def token_text(self, token_ids):
        return " ".join(map(str, token_ids))


def test_the_first_difference_comes_with_its_gap():
    plain, dflash = Answer("", [1, 2, 3, 4], 1, 3, 0), Answer("", [1, 2, 9, 4], 1, 2, 1)
    assert _divergence(Scorer(), "a prompt", plain, dflash) == Divergence(2, "3", "9", 0.25)


def test_an_answer_that_ends_early_differs_at_its_end():
    plain, dflash = Answer("", [1, 2], 1, 1, 0), Answer("", [1, 2, 9], 1, 1, 1)
    assert _divergence(Scorer(), "a prompt", plain, dflash) == Divergence(2, "", "9", None)


def test_equal_answers_have_no_difference():
    same = Answer("", [1, 2], 1, 1, 0)
    assert _divergence(Scorer(), "a prompt", same, same) is None


def test_leaving_takes_down_a_child_that_is_still_busy(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "SHUTDOWN_S", 0.1)
    begin = time.monotonic()
    options = {"model_path": "x", "dtype": "auto"}
    with EngineProcess("plain", options, on_cpu=True, log_path=tmp_path / "log") as process:
        pid = process._child.pid
    assert not alive(pid)
    assert time.monotonic() - begin < 10


def test_a_child_that_dies_is_told_with_the_end_of_its_log(tmp_path):
    (tmp_path / "log").write_text("the reason\n")
    options = {"model_path": "x", "dtype": "auto"}
    with EngineProcess("plain", options, on_cpu=True, log_path=tmp_path / "log") as process:
        process._child.kill()
        with pytest.raises(
            DemoError, match=r"plain engine failed: .*exit code -9\n  \| the reason"
        ):
            process.ready()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
